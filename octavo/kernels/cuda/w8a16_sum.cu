// y [M, N] 16 bit = the sum of `count` parts [M, N], which begin `stride` values apart, in order and in float32, + bias [N].
//
// Compiled per variant with: NAME, X_BF16 (the type of y and bias), PARTS_FLOAT (parts in float32, or like y), WIDTH
// (values a thread takes: 8, which divides N, or 1).
#include "device.cuh"

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }
DEVICE u16 rounded(float value) { return X_BF16 ? bf16_of_float(value) : fp16_of_float(value); }

struct __attribute__((aligned(2 * WIDTH))) Halves {
    u16 at[WIDTH];
};

#if PARTS_FLOAT
struct __attribute__((aligned(WIDTH == 8 ? 16 : 4))) Part {
    float at[WIDTH];
};
DEVICE float value_of(float value) { return value; }
#else
typedef Halves Part;
DEVICE float value_of(u16 bits) { return float_of(bits); }
#endif

KERNEL(256, 1) NAME(const void* parts, const u16* bias, u16* y, int count, i64 stride, int M, int N) {
    const i64 size = i64(M) * N, at = (i64(blockIdx.x) * 256 + threadIdx.x) * WIDTH;
    wait_for_previous_kernel();
    if (at >= size) return;
    float total[WIDTH] = {};
    for (int part = 0; part < count; ++part) {
        const Part p = static_cast<const Part*>(parts)[(part * stride + at) / WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) total[i] += value_of(p.at[i]);
    }
    Halves result;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        if (bias != nullptr) total[i] += float_of(bias[at % N + i]);
        result.at[i] = rounded(total[i]);
    }
    reinterpret_cast<Halves*>(y)[at / WIDTH] = result;
}
