// y = x W^T for few tokens: x 16 bit [M, K], W FP8 codes [N, K] as files hold them, y 16 bit [M, N].
//
// Decoding is bound by reading W once, so W never passes through shared memory: a lane loads 16 consecutive codes of a
// row, decodes them in registers, and they are the A operand of mma.m16n8k16 as they lie. The order of K inside an mma
// is free as long as both operands agree: slots (2t, 2t+1) and (2t+8, 2t+9) of lane t take codes (4s, 4s+1) and
// (4s+2, 4s+3) of its 16, and B takes the same positions of x. Weights are the rows of the product and tokens its
// columns, so up to 8 tokens cost what one costs.
//
// A block holds WARPS_N x WARPS_K warps: WARPS_N groups of 16 * TILES_N rows, whose K is dealt to WARPS_K warps in
// chunks of 128, which keeps 1 KiB and more of a row in flight. Partial sums meet in shared memory in a fixed order: no
// atomics, no locks, the same bits every time.
//
// Compiled per variant with: NAME, X_BF16, E5M2, SCALES (0 tensor, 1 row, 2 block 128 x 128), TILES_N, TILES_M,
// WARPS_N, WARPS_K, DEPTH. Needs K % 16 == 0 and rows of x on 16-byte boundaries.
#define MMA_BF16 X_BF16
#include "w8a16.cuh"

#define ROWS (16 * TILES_N * WARPS_N)
#define TOKENS (8 * TILES_M)
// Lanes of a warp write rows g and tokens 2t: a stride of 4 past a multiple of 16 keeps them in different banks.
#define PITCH (ROWS + 4)

// A lane's part of one chunk of W: two rows (g and g + 8) of each tile, 16 codes from each half of the chunk.
struct Chunk {
    uint4 codes[TILES_N][2][2];
};

struct Operands {
    const u8* rows[TILES_N][2];
    const u16* tokens[TILES_M];
    int K;
};

DEVICE void load(Chunk& w, const Operands& from, int chunk, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int k = chunk * CHUNK + half * 64 + t * 16;
#pragma unroll
        for (int i = 0; i < TILES_N; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                w.codes[i][r][half] = k < from.K ? load_once(from.rows[i][r] + k) : uint4{0, 0, 0, 0};
        }
    }
}

DEVICE void multiply(float (&sum)[TILES_N][TILES_M][4], const Chunk& w, const Operands& from, int chunk, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int k = chunk * CHUNK + half * 64 + t * 16;
        Words x[TILES_M][2];
#pragma unroll
        for (int j = 0; j < TILES_M; ++j) {
            // Past the end x is zero as well: a weight of zero times what lies there could be NaN.
            x[j][0] = words(k < from.K ? load_shared_by_all(from.tokens[j] + k) : uint4{0, 0, 0, 0});
            x[j][1] = words(k < from.K ? load_shared_by_all(from.tokens[j] + k + 8) : uint4{0, 0, 0, 0});
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int i = 0; i < TILES_N; ++i) {
                const Pairs upper = decode(words(w.codes[i][0][half]).at[s]);
                const Pairs lower = decode(words(w.codes[i][1][half]).at[s]);
                const u32 a[4] = {upper.low, lower.low, upper.high, lower.high};
#pragma unroll
                for (int j = 0; j < TILES_M; ++j) {
                    const u32 b[2] = {x[j][s / 2].at[s % 2 * 2], x[j][s / 2].at[s % 2 * 2 + 1]};
                    mma(sum[i][j], a, b);
                }
            }
        }
    }
}

KERNEL(32 * WARPS_N * WARPS_K, 1)
NAME(const u8* codes, const float* scale, const u16* x, const u16* bias, u16* y, int M, int N, int K, i64 x_stride) {
    SHARED float partial[WARPS_K][TOKENS][PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int block_row = blockIdx.x * ROWS, block_token = blockIdx.y * TOKENS;
    const int warp_row = block_row + warp_n * 16 * TILES_N;
    const int chunks = (K + CHUNK - 1) / CHUNK;

    Operands from;
    from.K = K;
#pragma unroll
    for (int i = 0; i < TILES_N; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // rows and tokens past the end read the last one and are not stored
            const int row = warp_row + 16 * i + 8 * r + g;
            from.rows[i][r] = codes + i64(row < N ? row : N - 1) * K;
        }
    }
#pragma unroll
    for (int j = 0; j < TILES_M; ++j) {
        const int token = block_token + 8 * j + g;
        from.tokens[j] = x + i64(token < M ? token : M - 1) * x_stride;
    }

    float sum[TILES_N][TILES_M][4] = {};
    Chunk w[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(w[d], from, warp_k + d * WARPS_K, t);
    for (int first = warp_k; first < chunks; first += WARPS_K * DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int chunk = first + d * WARPS_K;
            if (chunk < chunks) {
#if SCALES == 2
                float part[TILES_N][TILES_M][4] = {};
                multiply(part, w[d], from, chunk, t);
#pragma unroll
                for (int i = 0; i < TILES_N; ++i) {  // a tile's 16 rows lie in one block of 128
                    const int row = warp_row + 16 * i;
                    const float s = scale[(row < N ? row : N - 1) / 128 * chunks + chunk];
#pragma unroll
                    for (int j = 0; j < TILES_M; ++j)
#pragma unroll
                        for (int c = 0; c < 4; ++c) sum[i][j][c] += part[i][j][c] * s;
                }
#else
                multiply(sum, w[d], from, chunk, t);
#endif
            }
            load(w[d], from, chunk + WARPS_K * DEPTH, t);
        }
    }

#pragma unroll
    for (int i = 0; i < TILES_N; ++i)
#pragma unroll
        for (int j = 0; j < TILES_M; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)  // accumulator layout of m16n8k16: rows g, g + 8; columns 2t, 2t + 1
                partial[warp_k][8 * j + 2 * t + c % 2][(warp_n * TILES_N + i) * 16 + 8 * (c / 2) + g] = sum[i][j][c];
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * TOKENS; at += 32 * WARPS_N * WARPS_K) {
        const int row = block_row + at % ROWS, token = block_token + at / ROWS;
        if (row >= N || token >= M) continue;
        float total = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPS_K; ++part) total += partial[part][at / ROWS][at % ROWS];
        total *= DECODE_UNIT;
        if (SCALES < 2) total *= scale[SCALES == 1 ? row : 0];
        if (bias != nullptr) total += float_of(bias[row]);
        y[i64(token) * N + row] = rounded(total);
    }
}
