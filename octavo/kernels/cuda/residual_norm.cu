// What stands between two blocks of a decoder for few tokens: residual += delta, y = RMSNorm(residual) * weight.
//
// delta, residual and y 16 bit [M, K], contiguous; delta may be absent. Float32 sums; rounded to 16 bit where
// Transformers' own norm rounds. One block a token, 8 values a thread and round. Compiled per variant with: NAME, X_BF16,
// THREADS, ROUNDS. Needs K % 8 == 0 and K <= 8 * THREADS * ROUNDS.
#include "rows.cuh"

KERNEL(THREADS, 1)
NAME(const u16* delta, u16* residual, const u16* weight, u16* y, float epsilon, int K) {
    SHARED float sum_of_warp[WARPS];
    const i64 row = blockIdx.x;
    wait_for_previous_kernel();
    Values x[ROUNDS];
    float squares = 0.0f;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        x[r] = Values{};
        if (k >= K) continue;
        x[r] = values(*reinterpret_cast<const uint4*>(residual + row * K + k));
        if (delta != nullptr) {
            const Values d = values(load_once(delta + row * K + k));
#pragma unroll
            for (int i = 0; i < 8; ++i) x[r].at[i] += d.at[i];
            const uint4 sum = rounded(x[r]);
            *reinterpret_cast<uint4*>(residual + row * K + k) = sum;
            x[r] = values(sum);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += x[r].at[i] * x[r].at[i];
    }
    leave_sum(squares, sum_of_warp);
    __syncthreads();
    const float rstd = 1.0f / sqrtf(take_sum(sum_of_warp) / float(K) + epsilon);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        if (k >= K) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[r].at[i] *= rstd;
        const Values normal = values(rounded(x[r]));
        *reinterpret_cast<uint4*>(y + row * K + k) = rounded(times(normal, values(load_shared_by_all(weight + k))));
    }
}
