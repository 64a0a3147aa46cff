// Rows of 16-bit values, 8 a thread and round: what they add up to, and their E4M3 codes.
//
// A source that includes this defines X_BF16 and THREADS (a multiple of 32) first.
#pragma once
#include "device.cuh"

#define INFINITE float_of_bits(0x7F800000u)
#define WARPS (THREADS / 32)
#define WARPS_TO_POWER (WARPS > 16 ? 32 : WARPS > 8 ? 16 : WARPS > 4 ? 8 : 4)

struct Values {
    float at[8];
};

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }
DEVICE u32 rounded(float low, float high) {
    return X_BF16 ? bf16x2_of_floats(low, high) : fp16x2_of_floats(low, high);
}

DEVICE Values values(const uint4& loaded) {
    const u32 word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    Values v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] = float_of(u16(word[i / 2] >> (i % 2 * 16)));
    return v;
}

DEVICE uint4 rounded(const Values& v) {
    return uint4{rounded(v.at[0], v.at[1]), rounded(v.at[2], v.at[3]), rounded(v.at[4], v.at[5]),
                 rounded(v.at[6], v.at[7])};
}

// from: on a 32-byte boundary
DEVICE Values floats(const float* from) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

DEVICE Values times(Values v, const Values& by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] *= by.at[i];
    return v;
}

// The values of 8 codes, times `scale`. NaN codes read as +-480.
DEVICE Values decoded(const uint2& codes, float scale) {
    const u32 word[2] = {codes.x, codes.y};
    const float unit = 256.0f * scale;  // no scale is so large that this overflows
    Values v;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const Pairs pairs = e4m3_to_fp16(word[w]);
        const u32 pair[2] = {pairs.low, pairs.high};
#pragma unroll
        for (int i = 0; i < 4; ++i) v.at[4 * w + i] = float_of_fp16(u16(pair[i / 2] >> (i % 2 * 16))) * unit;
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

// A scale, and factors on either side of its reciprocal, the one above negative.
struct Scale {
    float value, below, above;
};

// The reciprocal is off by one unit in the last place at most, the factors by 2**-21 to either side.
DEVICE Scale around(float scale) {
    const float inverse = reciprocal_approximately(scale);
    return {scale, inverse * (1.0f - 4.76837158203125e-7f), inverse * -(1.0f + 4.76837158203125e-7f)};
}

// amax / 448 correctly rounded (all significands were tried), at least 2**-126, 1 for zeros.
DEVICE Scale scale_of(float amax) {
    const float inverse_448 = 1.0f / 448.0f, quotient = amax * inverse_448;
    const float corrected = fmaf(fmaf(-quotient, 448.0f, amax), inverse_448, quotient);
    return around(amax > 0.0f ? larger(float_of_bits(0x00800000u), corrected) : 1.0f);
}

// Codes of v / scale, correctly rounded quotients, without a division: rounding is monotonic, so where the products with
// a factor below and one above the reciprocal have the same code, the quotient has it too. Where they do not (a
// quotient within 2**-20 of the edge of a code, or NaN, which loses its sign in both), it is divided.
DEVICE void store_codes(u8* to, const Values& v, const Scale& scale) {
    u32 codes[2], opposite[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const float b = scale.below, a = scale.above, *at = v.at + 4 * w;
        codes[w] = e4m3_of_floats(at[0] * b, at[1] * b, at[2] * b, at[3] * b);
        opposite[w] = e4m3_of_floats(at[0] * a, at[1] * a, at[2] * a, at[3] * a);
    }
    if (((codes[0] ^ opposite[0]) & (codes[1] ^ opposite[1])) != 0x80808080u ||
        ((codes[0] ^ opposite[0]) | (codes[1] ^ opposite[1])) != 0x80808080u) {
#pragma unroll 1  // rare: little code, few registers
        for (int i = 0; i < 8; ++i) {
            float value = v.at[0];
#pragma unroll
            for (int j = 1; j < 8; ++j) value = i == j ? v.at[j] : value;
            codes[0] = codes[0] >> 8 | codes[1] << 24;
            codes[1] = codes[1] >> 8 | e4m3_of_float(value / scale.value) << 24;
        }
    }
    *reinterpret_cast<uint2*>(to) = uint2{codes[0], codes[1]};
}

// A scale that is amax / 448 of 16-bit values, and its reciprocal in two parts: 1 / value = inverse + rest, to 2**-46, rest
// above 0, so that no sign is lost.
struct Reciprocal {
    float value, inverse, rest;
};

DEVICE Reciprocal reciprocal_of(const Scale& scale) {
    const float s = scale.value, first = reciprocal_approximately(s);
    float inverse = fmaf(fmaf(-first, s, 1.0f), first, first);
    if (fmaf(-inverse, s, 1.0f) <= 0.0f) inverse = float_of_bits(bits_of_float(inverse) - 1);
    const float remainder = fmaf(-inverse, s, 1.0f), rest = remainder * inverse;
    return {s, inverse, fmaf(rest, remainder, rest)};
}

// Codes of 16-bit values by the scale of the largest of them. These have so few significant bits that quotients often
// lie on the edge of a code, and so few that x * inverse + x * rest never is on the wrong side of one: tried for all
// significands of values and largest values (tests/kernels/test_quantize.py).
DEVICE void store_codes(u8* to, const uint4& loaded, const Reciprocal& by) {
    const Values v = values(loaded);
    if (X_BF16 && by.value > float_of_bits(0x71800000u)) {  // 2**100: rest would be subnormal
        store_codes(to, v, around(by.value));
        return;
    }
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = fmaf(v.at[i], by.inverse, v.at[i] * by.rest);
    const u32 signs[2] = {permute(loaded.x, loaded.y, 0x7531), permute(loaded.z, loaded.w, 0x7531)};  // NaN keeps its own
    const u32 low = e4m3_of_floats(q[0], q[1], q[2], q[3]), high = e4m3_of_floats(q[4], q[5], q[6], q[7]);
    *reinterpret_cast<uint2*>(to) = uint2{(low & 0x7F7F7F7Fu) | (signs[0] & 0x80808080u),
                                          (high & 0x7F7F7F7Fu) | (signs[1] & 0x80808080u)};
}

DEVICE float amax_of_lanes(float amax, int lanes) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) amax = larger(amax, exchange(amax, mask));
    return amax;
}

// The scale of the 128 values that 16 lanes hold. All lanes of the warp call it.
DEVICE Scale scale_of_group(const Values& v) {
    float amax = amax_of_lanes(amax_of(v), 16);
    if (larger(amax, exchange(amax, 16)) == INFINITE) {  // the same for the warp
        const float finite = amax_of_lanes(finite_amax(v), 16);
        amax = amax == INFINITE ? finite : amax;
    }
    return scale_of(amax);
}

// Over the block: every thread leaves what it has, and after a barrier takes the result of all. Magnitudes compare like
// their bits.
DEVICE void leave_amax(float amax, u32* scratch) {
    const u32 bits = largest_of_warp(bits_of_float(amax));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = bits;
}

DEVICE float take_amax(const u32* scratch) {
    const int lane = threadIdx.x % 32;
    return float_of_bits(largest_of_warp(lane < WARPS ? scratch[lane] : 0));
}

DEVICE void leave_sum(float sum, float* scratch) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += exchange(sum, mask);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
}

// The same order of additions every time.
DEVICE float take_sum(const float* scratch) {
    const int warp = threadIdx.x % WARPS_TO_POWER;
    float sum = warp < WARPS ? scratch[warp] : 0.0f;
#pragma unroll
    for (int mask = WARPS_TO_POWER / 2; mask > 0; mask /= 2) sum += exchange(sum, mask);
    return sum;
}

// The scale of a row of this amax. finite(): the largest finite magnitude of this thread's values, asked for where there
// is an Inf among them. scratch: for nothing else.
template <class Finite>
DEVICE Scale scale_of_row(float amax, u32* scratch, Finite finite) {
    if (amax == INFINITE) {
        leave_amax(finite(), scratch);
        __syncthreads();
        amax = take_amax(scratch);
        __syncthreads();
    }
    return scale_of(amax);
}
