// y = (high + low) W^T for some to some hundred tokens: two E4M3 terms of x as split.cu leaves them with one scale for both,
// codes [2 M, K] and scales [M], W FP8 codes [N, K] as files hold them, y 16 bit [M, N]. Nothing is decoded: SM90's tensor
// cores take both operands from shared memory, and add the products of both terms to the same sums.
//
// A block takes 64 or 128 tokens and COLUMNS rows of W, and with SPLIT one of gridDim.z parts of K. Its two groups of four
// warps share the tokens, or have the same 64 and share the rows. Steps of 128 of K pass through a ring in shared memory,
// W's and x's rows of 128 bytes one below the other with their 16-byte pieces swizzled as the tensor cores want them. Two
// steps are in the hands of the tensor cores, so that they never wait for a barrier. Their sums are short (docs/numerics.md):
// every SHORT steps they are added in float32. With SPLIT the float32 sums go to `parts` [gridDim.z, M, N] for
// w8a16_sum.cu. No atomics, no locks, the same bits every time.
//
// Compiled per variant with: NAME, X_BF16, SCALES (0 tensor, 1 row, 2 block 128 x 128), COLUMNS (224 or 128; 128 with
// SCALES 2), TOKENS (64 or 128), DEPTH, SHORT (1 with SCALES 2), SPLIT. Needs K % 16 == 0; compiles for sm_90a.
#if TOKENS == 128
#define WIDTH COLUMNS  // of what a group of warps multiplies: a name of an instruction is made of it
#elif COLUMNS == 224
#define WIDTH 112
#else
#define WIDTH 64
#endif
#include "wgmma.cuh"

#define STEP 128
#define W_BYTES (COLUMNS * STEP)
#define TERM_BYTES (TOKENS * STEP)
#define SLOT (W_BYTES + 2 * TERM_BYTES)
#define PITCH (COLUMNS + 8)  // of float32 sums: 8 past a multiple of 32, so that pairs of a warp lie in different banks

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }
DEVICE u16 rounded(float value) { return X_BF16 ? bf16_of_float(value) : fp16_of_float(value); }

// 16 bytes of a row of 128 in shared memory.
DEVICE u8* swizzled(u8* rows, int row, int piece) { return rows + row * STEP + ((piece ^ (row & 7)) << 4); }

KERNEL(256, 1)
NAME(const u8* codes, const float* scale, const u8* terms, const float* term_scale, const u16* bias, u16* y, float* parts,
     int M, int N, int K) {
    DYNAMIC_SHARED(dynamic);
    u8* shared = reinterpret_cast<u8*>(dynamic);
    const int group = threadIdx.x / 128;
    const int group_token = TOKENS == 128 ? group * 64 : 0, group_column = TOKENS == 128 ? 0 : group * WIDTH;
    const int block_token = blockIdx.x * TOKENS, block_row = blockIdx.y * COLUMNS;
    const int chunks = (K + STEP - 1) / STEP, each = (chunks + gridDim.z - 1) / gridDim.z;
    const int begin = blockIdx.z * each, end = begin + each < chunks ? begin + each : chunks;
    const int piece = threadIdx.x % 8, row_of_32 = threadIdx.x / 8;

    const auto copy_codes = [&](int step) {  // zeros past the end
        const int k = step * STEP + piece * 16;
        const bool there = step < end && k < K;
        const u8* from = codes + i64(block_row + row_of_32) * K + k;
#pragma unroll
        for (int i = 0; i < COLUMNS / 32; ++i, from += i64(32) * K)
            copy_later(swizzled(shared + step % DEPTH * SLOT, row_of_32 + 32 * i, piece), from,
                       there && block_row + row_of_32 + 32 * i < N);
    };
    const auto copy_terms = [&](int step) {
        u8* slot = shared + step % DEPTH * SLOT + W_BYTES;
        const int k = step * STEP + piece * 16;
        const bool there = step < end && k < K;
        const u8* from = terms + i64(block_token + row_of_32) * K + k;
#pragma unroll
        for (int i = 0; i < TOKENS / 32; ++i, from += i64(32) * K) {
            const bool inside = there && block_token + row_of_32 + 32 * i < M;
            copy_later(swizzled(slot, row_of_32 + 32 * i, piece), from, inside);
            copy_later(swizzled(slot + TERM_BYTES, row_of_32 + 32 * i, piece), from + i64(M) * K, inside);
        }
        end_of_copies();
    };

    // While the kernel before runs, the first codes are on their way.
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy_codes(begin + d);
    end_of_previous_kernel();

    float product[WIDTH / 2], sum[WIDTH / 2] = {};
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy_terms(begin + d);
    for (int first = begin; first < end; first += SHORT) {
#pragma unroll
        for (int i = 0; i < SHORT; ++i) {
            const int step = first + i;
            wait_for_copies<DEPTH - 2>();
            order_for_tensor_cores();
            __syncthreads();  // the step is here for all
            const u8* w = shared + step % DEPTH * SLOT + group_column * STEP;
            const u8* x = shared + step % DEPTH * SLOT + W_BYTES + group_token * STEP;
            begin_products();
#pragma unroll
            for (int k = 0; k < STEP; k += 32) {
                multiply_codes(product, x + k, w + k, i > 0 || k > 0);
                multiply_codes(product, x + TERM_BYTES + k, w + k, true);
            }
            end_of_products();
            if (i < SHORT - 1)
                wait_for_products<1>();
            else
                wait_for_products<0>();
            __syncthreads();  // all are through with the step before
            copy_codes(step + DEPTH - 1);
            copy_terms(step + DEPTH - 1);
        }
        const float unit = SCALES == 2 ? scale[i64(blockIdx.y) * chunks + first] : 1.0f;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) sum[i] += SCALES == 2 ? product[i] * unit : product[i];
    }

    start_of_next_kernel();
    wait_for_copies<0>();
    __syncthreads();
    float(*out)[PITCH] = reinterpret_cast<float(*)[PITCH]>(shared);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {  // accumulator layout of wgmma: rows g and g + 8 of a warp's 16, columns 2t
        const int row = group_token + threadIdx.x % 128 / 32 * 16 + upper * 8 + g, token = block_token + row;
        const float s = token < M ? term_scale[token] : 0.0f;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; ++j) {
            out[row][group_column + 8 * j + 2 * t] = sum[4 * j + 2 * upper] * s;
            out[row][group_column + 8 * j + 2 * t + 1] = sum[4 * j + 2 * upper + 1] * s;
        }
    }
    __syncthreads();
    const int column = threadIdx.x % COLUMNS, row = block_row + column;
    if (threadIdx.x >= 256 / COLUMNS * COLUMNS || row >= N) return;
    const float s = SCALES == 2 ? 1.0f : scale[SCALES == 1 ? row : 0];
#if !SPLIT
    const float offset = bias != nullptr ? float_of(bias[row]) : 0.0f;
#endif
#pragma unroll 4
    for (int i = threadIdx.x / COLUMNS; i < TOKENS && block_token + i < M; i += 256 / COLUMNS) {
        const i64 at = i64(block_token + i) * N + row;
#if SPLIT
        parts[blockIdx.z * (i64(M) * N) + at] = out[i][column] * s;
#else
        y[at] = rounded(out[i][column] * s + offset);
#endif
    }
}
