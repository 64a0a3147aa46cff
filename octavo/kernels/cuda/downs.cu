// The A [r, K] of up to three adapters, float32, one below the other (R rows) -> E4M3 codes [room, K] and a unit a row.
//
// a = (leading + trailing) * step, step a power of two with amax <= 448 * step. Rows j, R + j and 2 R + j hold the leading,
// the trailing and again the leading codes of row j; rows from 3 R on are zeros. unit[j] = step * the adapter's scaling.
// One block a row. Compiled with: NAME. Needs K % 4 == 0, rows on 16-byte boundaries.
#include "terms.cuh"

#define THREADS 256

KERNEL(THREADS, 1)
NAME(const float* first, const float* second, const float* third, u8* codes, float* unit, float first_scaling,
     float second_scaling, float third_scaling, int first_end, int second_end, int R, int K) {
    wait_for_previous_kernel();
    SHARED float amax_of_warp[THREADS / 32];
    const int j = blockIdx.x;
    if (j >= R) {
        u32* row = reinterpret_cast<u32*>(codes + i64(2 * R + j) * K);
        for (int k = threadIdx.x; k < K / 4; k += THREADS) row[k] = 0;
        return;
    }
    const float* from = j < first_end    ? first + i64(j) * K
                        : j < second_end ? second + i64(j - first_end) * K
                                         : third + i64(j - second_end) * K;
    float amax = 0.0f;
    for (int k = threadIdx.x * 4; k < K; k += THREADS * 4) {
        const float4 a = *reinterpret_cast<const float4*>(from + k);
        const float value[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(value[i]) < INFINITE ? fabsf(value[i]) : 0.0f);
    }
    amax = max_of_warp(amax);
    if (threadIdx.x % 32 == 0) amax_of_warp[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) amax = fmaxf(amax, amax_of_warp[warp]);
    // Not below 2**-100: its inverse is finite, and so is what multiplies it.
    const float least = float_of_bits(0x0D800000u);
    const float step = amax > 0.0f ? fmaxf(least, power_of_two_above(amax / 448.0f)) : 1.0f;
    for (int k = threadIdx.x * 4; k < K; k += THREADS * 4) {
        const float4 a = *reinterpret_cast<const float4*>(from + k);
        const float value[4] = {a.x, a.y, a.z, a.w};
        u32 leading = 0, trailing = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Terms t = terms_of(value[i] / step);
            leading |= t.leading << 8 * i, trailing |= t.trailing << 8 * i;
        }
        *reinterpret_cast<u32*>(codes + i64(j) * K + k) = leading;
        *reinterpret_cast<u32*>(codes + i64(R + j) * K + k) = trailing;
        *reinterpret_cast<u32*>(codes + i64(2 * R + j) * K + k) = leading;
    }
    if (threadIdx.x == 0) unit[j] = step * (j < first_end ? first_scaling : j < second_end ? second_scaling : third_scaling);
}
