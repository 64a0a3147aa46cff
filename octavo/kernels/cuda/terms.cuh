// Values as the sum of two E4M3 codes, and rows of codes moved by a power of two: what puts an adapter's low-rank
// product into the columns of an FP8 product (octavo/ops/adapter_columns.py).
#pragma once
#include "device.cuh"

#define INFINITE float_of_bits(0x7F800000u)

struct Terms {
    u32 leading, trailing;
};

DEVICE float value_of(u32 code) { return float_of_fp16(u16(e4m3_to_fp16(code).low)) * 256.0f; }

// What E4M3 leaves of a value, rounded to E4M3 again: eight bits together, as many as bfloat16 has. Inf becomes NaN: a
// sum that holds it must not look finite.
DEVICE Terms terms_of(float value) {
    const float finite = fabsf(value) < INFINITE ? value : float_of_bits(0x7FC00000u);
    const u32 leading = e4m3_of_float(finite);
    return {leading, e4m3_of_float(finite - value_of(leading))};
}

// The least power of two that is not below x > 0.
DEVICE float power_of_two_above(float x) { return float_of_bits((bits_of_float(x) + 0x7FFFFFu) & 0x7F800000u); }

// By how much codes must shrink for `largest` to be one: 1 where it is already. NaN and Inf do not count.
DEVICE float shrinkage(float largest) {
    return largest > 448.0f && largest < INFINITE ? power_of_two_above(largest / 448.0f) : 1.0f;
}

// With a scale of their own: the largest finite one is 448.
DEVICE float scale_of_largest(float largest) { return largest > 0.0f && largest < INFINITE ? largest / 448.0f : 1.0f; }

DEVICE float max_of_warp(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, exchange(value, mask));
    return value;
}

// One warp divides a row of codes by a power of two: exact but for what becomes subnormal. K % 16 == 0.
DEVICE u32 shrunk_codes(u32 codes, float factor) {
    const Pairs pairs = e4m3_to_fp16(codes);
    const u32 pair[2] = {pairs.low, pairs.high};
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = float_of_fp16(u16(pair[i / 2] >> (i % 2 * 16))) * 256.0f * factor;
    u32 nan = ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;  // the top bit of each byte
    nan |= nan >> 1 | nan >> 2 | nan >> 3;
    nan |= nan >> 4;
    return (codes & nan) | (e4m3_of_floats(value[0], value[1], value[2], value[3]) & ~nan);
}

DEVICE void shrink_codes(u8* row, int K, float by) {
    const float factor = 1.0f / by;
    uint4* vectors = reinterpret_cast<uint4*>(row);
    for (int i = threadIdx.x % 32; i < K / 16; i += 32) {
        const uint4 v = vectors[i];
        vectors[i] = uint4{shrunk_codes(v.x, factor), shrunk_codes(v.y, factor), shrunk_codes(v.z, factor),
                           shrunk_codes(v.w, factor)};
    }
}
