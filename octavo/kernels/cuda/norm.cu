// Backward of RMSNorm with a frozen weight: dX = rstd * (t - x * rstd^2 * mean(t * x)) + residual, t = dY * weight.
//
// dY, x, residual and dX 16 bit [M, K], contiguous; residual may be absent. One block a token; a thread holds 8 values
// for each of ROUNDS rounds. Compiled per variant with: NAME, X_BF16, THREADS, ROUNDS. Needs K % 8 == 0 and
// K <= 8 * THREADS * ROUNDS.
#include "rows.cuh"

KERNEL(THREADS, 1)
NAME(const u16* dy, const u16* x, const float* weight, const float* rstd, const u16* residual, u16* dx, int K) {
    SHARED float sum_of_warp[THREADS / 32];
    const i64 row = blockIdx.x;
    uint4 dy_loaded[ROUNDS], x_loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        dy_loaded[r] = k < K ? load_once(dy + row * K + k) : uint4{0, 0, 0, 0};
        x_loaded[r] = k < K ? load_once(x + row * K + k) : uint4{0, 0, 0, 0};
    }
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        const Values t = times(values(dy_loaded[r]), weight + (k < K ? k : 0)), v = values(x_loaded[r]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += t.at[i] * v.at[i];
    }
    const float norm = rstd[row];
    const float mean = sum_of_block(sum, sum_of_warp) / float(K) * norm * norm;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        if (k >= K) continue;
        const Values t = times(values(dy_loaded[r]), weight + k), v = values(x_loaded[r]);
        Values result = {};
        if (residual != nullptr) result = values(load_once(residual + row * K + k));
#pragma unroll
        for (int i = 0; i < 8; ++i) result.at[i] += norm * (t.at[i] - v.at[i] * mean);
        store_rounded(dx + row * K + k, result);
    }
}
