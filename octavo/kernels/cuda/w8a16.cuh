// What the products of FP8 weights with 16-bit inputs share: codes as the A operand of mma.m16n8k16, weights' rows as the
// rows of the product and tokens as its columns.
//
// A lane loads 16 consecutive codes of a row and decodes them in registers; they are the A operand as they lie. The
// order of K inside an mma is free as long as both operands agree: slots (2t, 2t+1) and (2t+8, 2t+9) of lane t take codes
// (4s, 4s+1) and (4s+2, 4s+3) of its 16, and B takes the same positions of x. ALTERNATE: (4s, 4s+2) and (4s+1, 4s+3), which
// costs fewer instructions where none decodes E4M3.
//
// A source that includes this defines X_BF16, E5M2, MMA_BF16 (the type the product is computed in) and ALTERNATE_X
// (whether ALTERNATE may be) first.
#pragma once
#include "device.cuh"

#define CHUNK 128

#if E5M2 || MMA_BF16
#define DECODE_UNIT 1.0f
#else
#define DECODE_UNIT E4M3_FP16_UNIT
#endif

#define ALTERNATE (ALTERNATE_X && !E5M2 && !MMA_BF16 && !DECODES_E4M3)

DEVICE Pairs decode(u32 codes) {
#if ALTERNATE
    return e4m3_to_fp16_alternately(codes);
#elif MMA_BF16
    return E5M2 ? e5m2_to_bf16(codes) : e4m3_to_bf16(codes);
#else
    return E5M2 ? e5m2_to_fp16(codes) : e4m3_to_fp16_units(codes);
#endif
}

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }
DEVICE u16 rounded(float value) { return X_BF16 ? bf16_of_float(value) : fp16_of_float(value); }

struct Words {
    u32 at[4];
};

DEVICE Words words(const uint4& v) { return {{v.x, v.y, v.z, v.w}}; }
DEVICE uint4 vector(const Words& v) { return {v.at[0], v.at[1], v.at[2], v.at[3]}; }
DEVICE uint4 shared_vector(const void* at) { return *static_cast<const uint4*>(at); }
