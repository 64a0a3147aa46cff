// What every kernel stands on: fixed-width types, the few PTX instructions used, FP8 codes to 16-bit pairs.
//
// No header is included, so a source is one text: nothing to install beside NVRTC, and its hash is its cache key.
// The same text compiles for the host (tests/kernels/emulator.h defines OCTAVO_HOST and the instructions below), which
// is how kernels are checked where there is no GPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#ifndef OCTAVO_HOST

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) uint4 name[]

// 16 bytes that are read once: past L1, first to leave L2.
DEVICE uint4 load_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// 16 bytes that other warps read too.
DEVICE uint4 load_shared_by_all(const void* address) { return __ldg(static_cast<const uint4*>(address)); }

// 16 or 8 bytes into shared memory without a register: there, for this thread, once wait_for_copies says so.
DEVICE void copy_later(uint4* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from));
}

DEVICE void copy_later(uint2* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from));
}

// 16 bytes, or zeros unless `inside`; then nothing is read.
DEVICE void copy_later(void* to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(u32(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(inside ? 16 : 0));
}

DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;"); }

// Until all but the last `later` groups of copies are there.
template <int later>
DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(later) : "memory");
}

// Its line into the L2 cache.
DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// A kernel launched to overlap with the one before may run before it ended: until the first it reads only what is
// constant, as weights are, and writes nothing; a kernel that writes weights lets none start early. From the second on the
// next one may start.
DEVICE void end_of_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void start_of_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_previous_kernel() {
    end_of_previous_kernel();
    start_of_next_kernel();
}

DEVICE void sync_warp() { __syncwarp(); }

// The value of the lane whose number differs by the bits of `mask`.
DEVICE float exchange(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }

// The value of one lane.
DEVICE float broadcast(float value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }

// The largest of the warp's values.
DEVICE u32 largest_of_warp(u32 value) { return __reduce_max_sync(0xFFFFFFFFu, value); }

DEVICE u32 permute(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }  // never part of a fused multiply-add
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }

// Two bfloat16 times two bfloat16. fma.bf16x2 with -0: sm_80 has no mul.bf16x2.
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
    u32 product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

DEVICE u16 fp16_of_float(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u16 bf16_of_float(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Two rounded values, the first in the lower half.
DEVICE u32 fp16x2_of_floats(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE u32 bf16x2_of_floats(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE float float_of_fp16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// 2**x to two, 1 / x to one unit in the last place; subnormal numbers are zeros.
DEVICE float exp2_approximately(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

DEVICE float reciprocal_approximately(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// An 8 x 8 matrix of 16-bit values, lane (g, t) of the warp holding row g, columns 2t and 2t + 1 -> its transpose.
DEVICE u32 transpose_8x8(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Four 8 x 8 matrices of 16-bit values from shared memory. Lane l names the 16 bytes of row l % 8 of matrix l / 8; lane
// (g, t) gets of each matrix row g, columns 2t and 2t + 1. Turned: of the transposes.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(u32(__cvta_generic_to_shared(row)))
                 : "memory");
}

DEVICE void load_turned_matrices(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(u32(__cvta_generic_to_shared(row)))
                 : "memory");
}

// c += a b, a 16 x 16 row-major, b 16 x 8 column-major, FP32 accumulation (PTX ISA, mma.m16n8k16).
DEVICE void mma_fp16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

template <bool BF16>
DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if (BF16)
        mma_bf16(c, a, b);
    else
        mma_fp16(c, a, b);
}

// Four codes in natural order -> two pairs of 16-bit floats, each value times a power of two that DECODE_UNIT undoes.
// A code is sign, exponent, mantissa from the top: moved to the top of a 16-bit float its fields only need the distance
// of the two exponent widths as a right shift below the sign, and are then too small by the distance of the biases.
// Exact for every finite code, subnormals and -0 included; E4M3's two NaN codes read as +-480, not NaN (octavo
// verify finds them in a checkpoint).
struct Pairs {
    u32 low, high;
};

DEVICE u32 shifted_pair(u32 spread, int shift, u32 body) { return (spread & 0x80008000u) | ((spread >> shift) & body); }

DEVICE Pairs e4m3_to_fp16(u32 codes) {  // values times 2**-8
    return {shifted_pair(permute(codes, 0, 0x1404), 1, 0x3F803F80u),
            shifted_pair(permute(codes, 0, 0x3424), 1, 0x3F803F80u)};
}

// Values 0 and 2, 1 and 3: no byte has to be moved to another half.
DEVICE Pairs e4m3_to_fp16_alternately(u32 codes) {
    return {(codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u), shifted_pair(codes, 1, 0x3F803F80u)};
}

// In units of E4M3_FP16_UNIT: SM89 and later convert two codes in one instruction, NaN codes to NaN.
#if !defined(OCTAVO_HOST) && __CUDA_ARCH__ >= 890
#define E4M3_FP16_UNIT 1.0f
#define DECODES_E4M3 1
DEVICE Pairs e4m3_to_fp16_units(u32 codes) {
    Pairs pairs;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs.low) : "h"(u16(codes)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs.high) : "h"(u16(codes >> 16)));
    return pairs;
}
#else
#define E4M3_FP16_UNIT 256.0f
#define DECODES_E4M3 0
DEVICE Pairs e4m3_to_fp16_units(u32 codes) { return e4m3_to_fp16(codes); }
#endif

DEVICE Pairs e4m3_to_bf16(u32 codes) {
    // Times 2**120 here, not in the sum: products near 2**-120 would reach FP32's subnormals.
    const u32 two_to_120 = 0x7B807B80u;
    return {multiply_bf16x2(shifted_pair(permute(codes, 0, 0x1404), 4, 0x07F007F0u), two_to_120),
            multiply_bf16x2(shifted_pair(permute(codes, 0, 0x3424), 4, 0x07F007F0u), two_to_120)};
}

DEVICE Pairs e5m2_to_fp16(u32 codes) { return {permute(codes, 0, 0x1404), permute(codes, 0, 0x3424)}; }

DEVICE Pairs e5m2_to_bf16(u32 codes) {
    const u32 two_to_112 = 0x77807780u;
    return {multiply_bf16x2(shifted_pair(permute(codes, 0, 0x1404), 3, 0x0FE00FE0u), two_to_112),
            multiply_bf16x2(shifted_pair(permute(codes, 0, 0x3424), 3, 0x0FE00FE0u), two_to_112)};
}

// FP32 -> E4M3 code: round to nearest, ties to even; saturate at +-448, Inf too; NaN keeps its sign; -0 and subnormals
// kept. Normal range: add half a unit of the last kept bit (less one where it is even) and cut. Subnormal range: adding
// 2**14 leaves the count of units of 2**-9 in the low bits.
DEVICE u32 e4m3_of_float(float value) {
    const u32 bits = bits_of_float(value);
    u32 magnitude = bits & 0x7FFFFFFFu;
    const bool is_nan = magnitude > 0x7F800000u;
    magnitude = magnitude < 0x43E00000u ? magnitude : 0x43E00000u;
    const u32 normal = ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - 960u;
    const u32 subnormal = bits_of_float(float_of_bits(magnitude) + 16384.0f) - 0x46800000u;
    const u32 code = is_nan ? 0x7Fu : (magnitude < 0x3C800000u ? subnormal : normal);
    return code | ((bits >> 24) & 0x80u);
}

// Four of them, the first in the lowest byte, as SM89's instruction converts: NaN loses its sign.
DEVICE u32 e4m3_of_floats(float a, float b, float c, float d) {
#if !defined(OCTAVO_HOST) && __CUDA_ARCH__ >= 890
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | u32(high) << 16;
#else
    u32 codes = e4m3_of_float(a) | e4m3_of_float(b) << 8 | e4m3_of_float(c) << 16 | e4m3_of_float(d) << 24;
    const u32 nan = ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
    return codes & ~nan;
#endif
}
