// Compensated rounding of up to 128 columns of a weight matrix, one warp a row: the loops of formats.rounding.
//
// COMPENSATE: code = nearest(v / s); out = v - code s. Else coordinate descent: code = nearest(code + v /
// M[j][j] / s); out = (new code - old code) s; columns whose M[j][j] is 0 stay. Then, for the columns i > j of the
// block, v[i] -= M[j][i] out. Rows are independent, columns are not: lane l holds columns l, l + 32, l + 64, l + 96, and
// the lane that owns column j tells the others what it came to.
//
// The grid: MANTISSA bits, MAX the largest value, steps of 2**-FINEST where values are subnormal. Every operation rounds
// as torch's does on CUDA; v[i] is updated by a fused multiply-add, where torch on a CPU rounds twice.
#include "device.cuh"

#define THREADS 256
#define HELD 4

DEVICE float nearest(float y) {
    const float most = float(MAX);
    y = y > most ? most : y < -most ? -most : y;
    const float finest = float_of_bits(u32(127 - FINEST) << 23);
    const float power = float_of_bits(bits_of_float(y) & 0x7F800000u) * (1.0f / float(1 << MANTISSA));
    const float step = power > finest ? power : finest;
    return rintf(y / step) * step;
}

KERNEL(THREADS, 1)
NAME(const float* value, i64 value_stride, const float* scale, i64 scale_stride, const float* matrix, i64 matrix_stride,
     float* code, i64 code_stride, float* out, int N, int B) {
    const i64 row = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (row >= N) return;
    const int lane = threadIdx.x % 32;
    float v[HELD], s[HELD], c[HELD], diagonal[HELD], result[HELD];
#pragma unroll
    for (int t = 0; t < HELD; ++t) {
        const int i = t * 32 + lane;
        const bool inside = i < B;
        v[t] = inside ? value[row * value_stride + i] : 0.0f;
        s[t] = inside ? scale[row * scale_stride + i] : 1.0f;
        c[t] = inside && !COMPENSATE ? code[row * code_stride + i] : 0.0f;
        diagonal[t] = inside ? matrix[i * matrix_stride + i] : 1.0f;
        result[t] = 0.0f;
    }
#pragma unroll
    for (int mine = 0; mine < HELD; ++mine) {
        for (int owner = 0; owner < 32 && mine * 32 + owner < B; ++owner) {
            float found;
            if (COMPENSATE) {
                const float y = nearest(v[mine] / s[mine]);
                found = v[mine] - rounded_product(y, s[mine]);
                if (lane == owner) c[mine] = y;
            } else {
                const bool live = diagonal[mine] > 0.0f;
                const float y = live ? nearest(c[mine] + v[mine] / diagonal[mine] / s[mine]) : c[mine];
                found = (y - c[mine]) * s[mine];
                if (lane == owner) c[mine] = y;
            }
            found = broadcast(found, owner);
            if (lane == owner) result[mine] = found;
            const float* factors = matrix + (mine * 32 + owner) * matrix_stride;
#pragma unroll
            for (int t = mine; t < HELD; ++t) {
                const int i = t * 32 + lane;
                if (i < B && i > mine * 32 + owner) v[t] -= factors[i] * found;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < HELD; ++t) {
        const int i = t * 32 + lane;
        if (i < B) {
            code[row * code_stride + i] = c[t];
            out[row * B + i] = result[t];
        }
    }
}
