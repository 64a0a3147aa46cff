// y = x W^T for 17 to some hundred tokens: x 16 bit [M, K], W FP8 codes [N, K] as files hold them, y 16 bit [M, N].
//
// A block takes ROWS rows of W and TOKENS tokens, and with SPLIT one of gridDim.z parts of K. Each warp has 16 * TILES_N
// rows of its own, whose codes go from a ring that only it reads straight into mma operands; decoded once for all tokens
// of the block. x passes through a ring that all warps read. With SPLIT the float32 sums go to `parts` [gridDim.z, M, N]
// for w8a16_sum.cu, which adds them in a fixed order: no atomics, no locks, the same bits every time.
//
// Compiled per variant with: NAME, X_BF16, E5M2, SCALES (0 tensor, 1 row, 2 block 128 x 128), TILES_N, TILES_M (a multiple
// of 4), WARPS, DEPTH, SPLIT. Needs K % 16 == 0 and rows of x on 16-byte boundaries.
#define MMA_BF16 X_BF16
#define ALTERNATE_X 0
#include "w8a16.cuh"

#define THREADS (32 * WARPS)
#define WARP_ROWS (16 * TILES_N)
#define ROWS (WARP_ROWS * WARPS)
#define TOKENS (8 * TILES_M)
#define STEP 64
#define X_PITCH (STEP * 2 + 16)  // bytes; 16 past a multiple of 128, so that rows of x begin in different banks
#define X_SLOT (TOKENS * X_PITCH)
#define W_SLOT (TILES_N * 2 * 32 * 16)
#define SLOT (WARPS * W_SLOT + X_SLOT)
#define PITCH (ROWS + 4)
#define GROUP (TILES_M < 8 ? TILES_M : 8)

KERNEL(THREADS, 1)
NAME(const u8* codes, const float* scale, const u16* x, const u16* bias, u16* y, float* parts, int M, int N, int K,
     i64 x_stride) {
    DYNAMIC_SHARED(dynamic);
    u8* shared = reinterpret_cast<u8*>(dynamic);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int block_row = blockIdx.x * ROWS, block_token = blockIdx.y * TOKENS;
    const int warp_row = block_row + warp * WARP_ROWS;
    const int chunks = (K + CHUNK - 1) / CHUNK, each = (chunks + gridDim.z - 1) / gridDim.z;
    const int first = blockIdx.z * each, last = first + each < chunks ? first + each : chunks;
    const int begin = first * (CHUNK / STEP), end = last * (CHUNK / STEP);

    const u8* rows[TILES_N][2];
#pragma unroll
    for (int i = 0; i < TILES_N; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // rows past the end read the last one and are not stored
            const int row = warp_row + 16 * i + 8 * r + g;
            rows[i][r] = codes + i64(row < N ? row : N - 1) * K;
        }
    }
    const auto copy = [&](int step) {
        u8* slot = shared + step % DEPTH * SLOT;
        if (step < end) {
            const int k = step * STEP + t * 16;
#pragma unroll
            for (int i = 0; i < TILES_N; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    copy_later(slot + warp * W_SLOT + ((i * 2 + r) * 32 + lane) * 16, rows[i][r] + (k < K ? k : 0), k < K);
            }
#pragma unroll
            for (int at = threadIdx.x; at < TOKENS * (STEP / 8); at += THREADS) {
                const int token = block_token + at / (STEP / 8), inner = at % (STEP / 8) * 8, column = step * STEP + inner;
                const bool inside = token < M && column < K;  // zeros elsewhere: what lies there could be NaN
                copy_later(slot + WARPS * W_SLOT + at / (STEP / 8) * X_PITCH + inner * 2,
                           inside ? x + token * x_stride + column : x, inside);
            }
        }
        end_of_copies();
    };

    float sum[TILES_N][TILES_M][4] = {};
#if SCALES == 2
    float part[TILES_N][TILES_M][4] = {};
#else
    float(&part)[TILES_N][TILES_M][4] = sum;
#endif
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy(begin + d);
    for (int step = begin; step < end; ++step) {
        wait_for_copies<DEPTH - 2>();
        __syncthreads();  // x is here for all, and all have read the slot that is filled next
        copy(step + DEPTH - 1);
        const u8* slot = shared + step % DEPTH * SLOT;
        const u8* w = slot + warp * W_SLOT + lane * 16;
        const u8* tokens = slot + WARPS * W_SLOT + g * X_PITCH + t * 32;
        Words codes_of[TILES_N][2];
#pragma unroll
        for (int i = 0; i < TILES_N; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) codes_of[i][r] = words(shared_vector(w + (i * 2 + r) * 512));
        }
        // 16 of K at a time for all sums of 8 groups of tokens: products that wait for each other lie far apart.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[2][TILES_N][4];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int i = 0; i < TILES_N; ++i) {
                    const Pairs up = decode(codes_of[i][0].at[2 * half + s]);
                    const Pairs down = decode(codes_of[i][1].at[2 * half + s]);
                    a[s][i][0] = up.low, a[s][i][1] = down.low, a[s][i][2] = up.high, a[s][i][3] = down.high;
                }
            }
#pragma unroll
            for (int first = 0; first < TILES_M; first += GROUP) {
                Words b[GROUP];
#pragma unroll
                for (int j = 0; j < GROUP; ++j)
                    b[j] = words(shared_vector(tokens + (first + j) * 8 * X_PITCH + half * 16));
#pragma unroll
                for (int s = 0; s < 2; ++s) {
#pragma unroll
                    for (int j = 0; j < GROUP; ++j) {
                        const u32 pair[2] = {b[j].at[2 * s], b[j].at[2 * s + 1]};
#pragma unroll
                        for (int i = 0; i < TILES_N; ++i) mma<MMA_BF16>(part[i][first + j], a[s][i], pair);
                    }
                }
            }
        }
#if SCALES == 2
        if (step % 2 == 1) {  // a warp's rows lie in one block of 128, as WARP_ROWS divides 128
            const float s = scale[(warp_row < N ? warp_row : N - 1) / 128 * chunks + step / 2];
#pragma unroll
            for (int i = 0; i < TILES_N; ++i)
#pragma unroll
                for (int j = 0; j < TILES_M; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c) sum[i][j][c] += part[i][j][c] * s, part[i][j][c] = 0.0f;
        }
#endif
    }

    // 32 tokens at a time through shared memory, so that rows are stored side by side.
    wait_for_copies<0>();
    float(*out)[PITCH] = reinterpret_cast<float(*)[PITCH]>(shared);
#pragma unroll
    for (int group = 0; group < TILES_M / 4; ++group) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES_N; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c)  // accumulator layout of m16n8k16: rows g, g + 8; columns 2t, 2t + 1
                    out[8 * j + 2 * t + c % 2][warp * WARP_ROWS + 16 * i + 8 * (c / 2) + g] = sum[i][group * 4 + j][c];
        __syncthreads();
        for (int at = threadIdx.x; at < ROWS * 32; at += THREADS) {
            const int row = block_row + at % ROWS, token = block_token + group * 32 + at / ROWS;
            if (row >= N || token >= M) continue;
            float total = out[at / ROWS][at % ROWS] * DECODE_UNIT;
            if (SCALES < 2) total *= scale[SCALES == 1 ? row : 0];
#if SPLIT
            parts[(i64(blockIdx.z) * M + token) * N + row] = total;
#else
            if (bias != nullptr) total += float_of(bias[row]);
            y[i64(token) * N + row] = rounded(total);
#endif
        }
    }
}
