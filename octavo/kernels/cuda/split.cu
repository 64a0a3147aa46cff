// BF16 x [M, K] -> E4M3 codes [2H, K] and scales [2H], H >= M: x = high + low, both E4M3 times a power of two per token.
//
// s = 2**(e - 7) for the largest finite value of the token in [2**e, 2**(e+1)). high = RNE(x / s) keeps 4 bits of the 8
// of a BF16; the rest is at most half of their last place, so 4 bits, and low = RNE((x / s - high) * FINER) keeps them all.
// FINER 32: high + low is x exactly down to 2**-13 of the largest value, and within 2**-21 of it below. FINER 1, one scale
// [H] for both: down to 2**-9 and within 2**-17. Inf becomes NaN.
//
// One block a token; row m of the result is high, row H + m low. Compiled per variant with: NAME, X_BF16 = 1, FINER,
// THREADS, ROUNDS. Needs K % 8 == 0, rows on 16-byte boundaries, K <= 8 * THREADS * ROUNDS.
#include "rows.cuh"

KERNEL(THREADS, 1) NAME(const u16* x, u8* codes, float* scale, int H, int K, i64 x_stride) {
    SHARED u32 scratch[WARPS];
    const i64 row = blockIdx.x;
    start_of_next_kernel();  // it may look at its weights
    end_of_previous_kernel();
    uint4 loaded[ROUNDS];
    float amax = 0.0f;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        loaded[r] = k < K ? load_once(x + row * x_stride + k) : uint4{0, 0, 0, 0};
        amax = larger(amax, finite_amax(values(loaded[r])));
    }
    leave_amax(amax, scratch);
    __syncthreads();
    amax = take_amax(scratch);
    const int exponent = int(bits_of_float(amax) >> 23);  // 127 + e
    const u32 biased = u32(exponent < 16 ? 8 : exponent - 7);
    const float s = float_of_bits(biased << 23), inverse = float_of_bits((254u - biased) << 23);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        if (k >= K) continue;
        Values v = values(loaded[r]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v.at[i] *= inverse;
            if (fabsf(v.at[i]) == INFINITE) v.at[i] = float_of_bits(0x7FC00000u);
        }
        const uint2 high = {e4m3_of_floats(v.at[0], v.at[1], v.at[2], v.at[3]),
                            e4m3_of_floats(v.at[4], v.at[5], v.at[6], v.at[7])};
        const Values kept = decoded(high, 1.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) v.at[i] = (v.at[i] - kept.at[i]) * float(FINER);
        const uint2 low = {e4m3_of_floats(v.at[0], v.at[1], v.at[2], v.at[3]),
                           e4m3_of_floats(v.at[4], v.at[5], v.at[6], v.at[7])};
        *reinterpret_cast<uint2*>(codes + row * K + k) = high;
        *reinterpret_cast<uint2*>(codes + (row + H) * K + k) = low;
    }
    if (threadIdx.x == 0) scale[row] = s;
    if (FINER > 1 && threadIdx.x == 0) scale[row + H] = s / float(FINER);
}
