// The sum of `parts` float32 matrices [M, pitch], times `factor`: the first N columns as float32 or, with TO_BF16,
// bfloat16, rows to_pitch apart. Always added in the same order. A thread takes four columns. Compiled with: NAME, TO_BF16.
// Needs pitch % 4 == 0, parts on 16 bytes.
#include "device.cuh"

#if TO_BF16
typedef u16 Result;
DEVICE u16 result_of(float value) { return bf16_of_float(value); }
#else
typedef float Result;
DEVICE float result_of(float value) { return value; }
#endif

KERNEL(256, 1)
NAME(const float* from, Result* to, float factor, int parts, i64 part_stride, i64 M, int N, int pitch, i64 to_pitch) {
    const int fours = (N + 3) / 4;
    const i64 at = i64(blockIdx.x) * 256 + threadIdx.x, row = at / fours;
    const int column = int(at % fours) * 4;
    if (row >= M) return;
    float sum[4] = {};
#pragma unroll 4
    for (int p = 0; p < parts; ++p) {
        const float4 v = *reinterpret_cast<const float4*>(from + p * part_stride + row * pitch + column);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (column + i < N) to[row * to_pitch + column + i] = result_of(sum[i] * factor);
}
