// y = x W^T for some hundred tokens without FP8 tensor cores: x as arrange.cu leaves it, FP16 [M, width] and factors [M], W
// FP8 codes [N, K] as files hold them, y 16 bit [M, N].
//
// A block takes ROWS rows of W and TOKENS tokens, and with SPLIT one of gridDim.z parts of K; a warp 64 of the tokens and 8 *
// TILES_N of the rows, the sums in its registers. Here tokens are the rows of the product and W's rows its columns, which
// come by eights: 112 rows for a block leave no multiprocessor idle where 128 would. Steps of 64 of K pass through a ring in
// shared memory. A lane decodes 16 consecutive codes of a row; x is arranged so that it is given the same positions by
// ldmatrix. With SPLIT the float32 sums go to `parts` [gridDim.z, M, N] for w8a16_sum.cu. No atomics, the same bits every
// time.
//
// Compiled per variant with: NAME, X_BF16 (the type of y and bias), E5M2, SCALES (0 tensor, 1 row), TILES_N, WARPS_N,
// WARPS_M, DEPTH, SPLIT. Needs K % 16 == 0; width = K rounded up to a multiple of 64.
#define MMA_BF16 0
#define ALTERNATE_X 1
#include "w8a16.cuh"

#define THREADS (32 * WARPS_N * WARPS_M)
#define WARP_ROWS (8 * TILES_N)
#define ROWS (WARP_ROWS * WARPS_N)
#define TOKENS (64 * WARPS_M)
#define STEP 64
#define X_SLOT (TOKENS * STEP * 2)
#define SLOT (X_SLOT + ROWS * STEP)

// 16 bytes of a token's 128 in shared memory, so that what a warp reads at once lies in different banks.
DEVICE u8* swizzled(u8* tokens, int token, int piece) { return tokens + token * STEP * 2 + ((piece ^ (token & 7)) << 4); }

KERNEL(THREADS, 1)
NAME(const u8* codes, const float* scale, const u16* x, const float* factor, const u16* bias, u16* y, float* parts, int M,
     int N, int K) {
    DYNAMIC_SHARED(dynamic);
    u8* shared = reinterpret_cast<u8*>(dynamic);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int warp_row = warp % WARPS_N * WARP_ROWS, warp_token = warp / WARPS_N * 64;
    const int block_row = blockIdx.x * ROWS, block_token = blockIdx.y * TOKENS;
    const int steps = (K + STEP - 1) / STEP, each = (steps + gridDim.z - 1) / gridDim.z;
    const int begin = blockIdx.z * each, end = begin + each < steps ? begin + each : steps;

    const auto copy = [&](int step) {  // zeros past the end: what lies there could be NaN
        u8* slot = shared + step % DEPTH * SLOT;
        const int token = threadIdx.x / 8, piece = threadIdx.x % 8, row = threadIdx.x / 4, k = step * STEP;
        if (step < end) {
            const u16* from = x + (i64(block_token + token) * steps + step) * STEP + piece * 8;
#pragma unroll
            for (int i = 0; i < TOKENS; i += THREADS / 8, from += i64(THREADS / 8) * steps * STEP)
                copy_later(swizzled(slot, token + i, piece), from, block_token + token + i < M);
            const u8* at = codes + i64(block_row + row) * K + k + threadIdx.x % 4 * 16;
#pragma unroll
            for (int i = 0; i < ROWS; i += THREADS / 4, at += i64(THREADS / 4) * K)
                if (i + THREADS / 4 <= ROWS || row + i < ROWS)
                    copy_later(slot + X_SLOT + i * STEP + threadIdx.x * 16, at,
                               block_row + row + i < N && k + threadIdx.x % 4 * 16 < K);
        }
        end_of_copies();
    };

    float sum[4][TILES_N][4] = {};
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy(begin + d);
    for (int step = begin; step < end; ++step) {
        wait_for_copies<DEPTH - 2>();
        __syncthreads();  // the step is here for all, and all have read the slot that is filled next
        copy(step + DEPTH - 1);
        u8* slot = shared + step % DEPTH * SLOT;
        Words w[TILES_N];
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
            w[j] = words(shared_vector(slot + X_SLOT + (warp_row + 8 * j + g) * STEP + t * 16));
#pragma unroll
        for (int s = 0; s < 4; ++s) {  // 16 of K at a time for all sums: products that wait for each other lie far apart
            u32 a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_matrices(a[i], swizzled(slot, warp_token + 16 * i + lane % 16, 2 * s + lane / 16));
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const Pairs pairs = decode(w[j].at[s]);
                const u32 b[2] = {pairs.low, pairs.high};
#pragma unroll
                for (int i = 0; i < 4; ++i) mma_fp16(sum[i][j], a[i], b);
            }
        }
    }

    wait_for_copies<0>();
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {  // accumulator layout of m16n8k16: rows g, g + 8; columns 2t, 2t + 1
            const int row = block_row + warp_row + 8 * j + 2 * t + c;
            if (row >= N) continue;
            const float unit = scale[SCALES == 1 ? row : 0];
#if !SPLIT
            const float offset = bias != nullptr ? float_of(bias[row]) : 0.0f;
#endif
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int token = block_token + warp_token + 8 * i + g;
                if (token >= M) continue;
                const float total = sum[i / 2][j][i % 2 * 2 + c] * DECODE_UNIT * factor[token] * unit;
#if SPLIT
                parts[(i64(blockIdx.z) * M + token) * N + row] = total;
#else
                y[i64(token) * N + row] = rounded(total + offset);
#endif
            }
        }
    }
}
