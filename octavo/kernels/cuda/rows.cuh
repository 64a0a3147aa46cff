// Rows of 16-bit values held in registers, 8 a thread and round: what they add up to, and their E4M3 codes.
//
// A source that includes this defines X_BF16 and THREADS (a multiple of 32) first.
#pragma once
#include "device.cuh"

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

DEVICE Values times(Values v, const float* columns) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] *= columns[i];
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

DEVICE float larger(float a, float b) { return b > a ? b : a; }

DEVICE float finite_amax(const Values& v) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 magnitude = bits_of_float(v.at[i]) & 0x7FFFFFFFu;
        amax = larger(amax, magnitude < 0x7F800000u ? float_of_bits(magnitude) : 0.0f);
    }
    return amax;
}

DEVICE float scale_of(float amax) {
    const float scale = amax / 448.0f;
    const float smallest_normal = float_of_bits(0x00800000u);
    return amax > 0.0f ? larger(smallest_normal, scale) : 1.0f;
}

DEVICE void store_codes(u8* to, const Values& v, float scale) {
    u32 word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i / 4] |= e4m3_of_float(v.at[i] / scale) << (i % 4 * 8);
    *reinterpret_cast<uint2*>(to) = uint2{word[0], word[1]};
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
