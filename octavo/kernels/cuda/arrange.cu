// x 16 bit [M, K] -> FP16 [M, width] for w8a16_wide.cu, a token times a power of two that brings its largest value below 2**15,
// and factors [M] that undo it. width: K rounded up to a multiple of 64, zeros past K. FP16 x only changes its order.
//
// Of each 64 values, piece c = 2s + o of 8 holds those of four lanes t: positions 4s + 2o and 4s + 2o + 1 of the 16 values
// from 16t on, or 4s + o and 4s + o + 2 where codes are decoded alternately (w8a16.cuh). BF16 is exact down to 2**-32 of the
// largest value, and off by 2**-40 of it at most below.
//
// One block a token. Compiled per variant with: NAME, X_BF16, E5M2, THREADS. Rows of x on 16-byte boundaries, K % 16 == 0.
#define MMA_BF16 0
#define ALTERNATE_X 1
#include "w8a16.cuh"

KERNEL(THREADS, 1) NAME(const u16* x, u16* arranged, float* factor, int K, int width, i64 x_stride) {
    const u16* row = x + blockIdx.x * x_stride;
    float multiplier = 1.0f;
#if X_BF16
    SHARED u32 exponents[THREADS / 32];
    u32 largest = 0;
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8)
        largest = larger_exponent(largest, words(load_shared_by_all(row + k)));
    largest = largest_of_warp(largest);
    if (threadIdx.x % 32 == 0) exponents[threadIdx.x / 32] = largest;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int up = power_to_fp16(largest_of_warp(lane < THREADS / 32 ? exponents[lane] : 0));
    multiplier = power_of_two(up);
    if (threadIdx.x == 0) factor[blockIdx.x] = power_of_two(-up);
#else
    if (threadIdx.x == 0) factor[blockIdx.x] = 1.0f;
#endif
    for (int at = threadIdx.x * 8; at < width; at += THREADS * 8) {
        const int piece = at / 8 % 8, first = at / 64 * 64 + piece / 2 * 4 + piece % 2 * (ALTERNATE ? 1 : 2);
        Words result;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int k = first + 16 * t;
            const u16 low = k < K ? row[k] : u16(0), high = k < K ? row[k + (ALTERNATE ? 2 : 1)] : u16(0);
            result.at[t] = X_BF16 ? fp16x2_of_floats(float_of(low) * multiplier, float_of(high) * multiplier)
                                  : low | u32(high) << 16;
        }
        *reinterpret_cast<uint4*>(arranged + i64(blockIdx.x) * width + at) = vector(result);
    }
}
