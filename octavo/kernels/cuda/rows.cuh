// Rows of 16-bit values held in registers, 8 a thread and round: what they add up to, and their E4M3 codes.
//
// A source that includes this defines X_BF16 and THREADS (a multiple of 32) first.
#pragma once
#include "device.cuh"

#define INFINITE float_of_bits(0x7F800000u)

struct Values {
    float at[8];
};

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }
DEVICE u16 rounded(float value) { return X_BF16 ? bf16_of_float(value) : fp16_of_float(value); }

DEVICE Values values(const uint4& loaded) {
    const u32 word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    Values v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] = float_of(u16(word[i / 2] >> (i % 2 * 16)));
    return v;
}

// columns on a 32-byte boundary
DEVICE Values times(Values v, const float* columns) {
    const float4 low = reinterpret_cast<const float4*>(columns)[0], high = reinterpret_cast<const float4*>(columns)[1];
    const float by[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] *= by[i];
    return v;
}

// The values of 8 codes, times `scale`. NaN codes read as +-480.
DEVICE Values decoded(const uint2& codes, float scale) {
    const u32 word[2] = {codes.x, codes.y};
    Values v;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const Pairs pairs = e4m3_to_fp16(word[w]);
        const u32 pair[2] = {pairs.low, pairs.high};
#pragma unroll
        for (int i = 0; i < 4; ++i) v.at[4 * w + i] = float_of_fp16(u16(pair[i / 2] >> (i % 2 * 16))) * 256.0f * scale;
    }
    return v;
}

// The larger magnitude; NaN counts as nothing, Inf as itself.
DEVICE float larger(float a, float b) { return fmaxf(a, fabsf(b)); }

DEVICE float amax_of(const Values& v) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = larger(amax, v.at[i]);
    return amax;
}

// The largest finite magnitude: what counts once amax_of has found an Inf.
DEVICE float finite_amax(const Values& v) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = larger(amax, fabsf(v.at[i]) < INFINITE ? v.at[i] : 0.0f);
    return amax;
}

// A scale and how to divide by it. `inverse` is 1 / value rounded; 0 says that only a true division gives the quotient:
// there is an Inf among the values, or the scale is so small that a remainder could be subnormal.
struct Scale {
    float value, inverse;
};

DEVICE Scale scale_of(float amax, bool infinite) {
    const float smallest_normal = float_of_bits(0x00800000u), two_to_minus_90 = float_of_bits(0x12800000u);
    const float scale = amax > 0.0f ? larger(smallest_normal, amax / 448.0f) : 1.0f;
    return {scale, infinite || scale < two_to_minus_90 ? 0.0f : 1.0f / scale};
}

// x / scale correctly rounded, without a division: two steps of correction by the remainder, the second from a quotient
// that is off by at most one unit in the last place (Markstein, IBM Journal of Research and Development 34, 1990).
DEVICE float divided(float x, const Scale& scale) {
    const float first = x * scale.inverse;
    const float second = fmaf(fmaf(-first, scale.value, x), scale.inverse, first);
    return copysignf(fmaf(fmaf(-second, scale.value, x), scale.inverse, second), x);  // -0 and the sign of a NaN
}

DEVICE void store_codes(u8* to, Values v, const Scale& scale) {
    if (scale.inverse != 0.0f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v.at[i] = divided(v.at[i], scale);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v.at[i] /= scale.value;
    }
    const u32 low = e4m3_of_floats(v.at[0], v.at[1], v.at[2], v.at[3]);
    *reinterpret_cast<uint2*>(to) = uint2{low, e4m3_of_floats(v.at[4], v.at[5], v.at[6], v.at[7])};
}

DEVICE void store_rounded(u16* to, const Values& v) {
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i / 2] |= u32(rounded(v.at[i])) << (i % 2 * 16);
    *reinterpret_cast<uint4*>(to) = uint4{word[0], word[1], word[2], word[3]};
}

DEVICE float amax_of_lanes(float amax, int lanes) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) amax = larger(amax, exchange(amax, mask));
    return amax;
}

// Over all threads of the block. `scratch` must not be in use; one is good for one reduction.
DEVICE float amax_of_block(float amax, float (&scratch)[THREADS / 32]) {
    amax = amax_of_lanes(amax, 32);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) amax = larger(amax, scratch[warp]);
    return amax;
}

// The same order of additions every time.
DEVICE float sum_of_block(float sum, float (&scratch)[THREADS / 32]) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += exchange(sum, mask);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) total += scratch[warp];
    return total;
}
