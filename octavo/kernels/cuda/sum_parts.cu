// Sums of parts, float32 [P, M, pitch], always added in the same order: their first N columns times `factor` as float32
// [M, N], and beside them, in the same launch, other parts [Q, L, pitch] as bfloat16 [L, N], rows to_pitch apart. L may be 0. A
// thread takes four columns. Compiled with: NAME. Needs pitch % 4 == 0, parts on 16 bytes.
#include "device.cuh"

KERNEL(256, 1)
NAME(const float* from, float* to, float factor, int P, i64 M, const float* other, u16* narrow, int Q, i64 L,
     i64 to_pitch, int N, int pitch) {
    wait_for_previous_kernel();
    const int fours = (N + 3) / 4;
    const i64 at = i64(blockIdx.x) * 256 + threadIdx.x, line = at / fours;
    const int column = int(at % fours) * 4;
    if (line >= L + M) return;
    const bool wide = line >= L;
    const i64 row = wide ? line - L : line, stride = (wide ? M : L) * pitch;
    const float* part = (wide ? from : other) + row * pitch + column;
    float sum[4] = {};
#pragma unroll 4
    for (int p = 0; p < (wide ? P : Q); ++p) {
        const float4 v = *reinterpret_cast<const float4*>(part + p * stride);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (column + i >= N) continue;
        if (wide)
            to[row * N + column + i] = sum[i] * factor;
        else
            narrow[row * to_pitch + column + i] = bf16_of_float(sum[i]);
    }
}
