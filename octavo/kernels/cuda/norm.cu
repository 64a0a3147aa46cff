// Backward of RMSNorm with a frozen weight: dX = rstd * (t - xhat * mean(t * xhat)) + residual, t = dY * weight.
//
// xhat = x * rstd comes from x, or with CODES from what the products read instead of xhat * weight: codes and scales per
// token. Then t * xhat is dY times what they say, and xhat is that by the weight, zero where the weight is zero.
// dY, x, residual and dX 16 bit [M, K], contiguous; codes `pitch` bytes a row apart; residual may be absent, and is added to what is rounded
// already: the bits of two steps. One block a
// token; a thread holds 8 values for each of ROUNDS rounds. Compiled per variant with: NAME, X_BF16, CODES, THREADS,
// ROUNDS. Needs K and pitch % 8 == 0 and K <= 8 * THREADS * ROUNDS.
#include "rows.cuh"

#if CODES
typedef u8 Input;
typedef uint2 Loaded;
#else
typedef u16 Input;
typedef uint4 Loaded;
#endif

KERNEL(THREADS, 1)
NAME(const u16* dy, const Input* x, const float* scale, const float* weight, const float* rstd, const u16* residual,
     u16* dx, int K, i64 pitch) {
    wait_for_previous_kernel();
    SHARED float sum_of_warp[WARPS];
    const i64 row = blockIdx.x;
    const auto column = [](int r) { return (r * THREADS + int(threadIdx.x)) * 8; };
    uint4 dy_loaded[ROUNDS];
    Loaded x_loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        dy_loaded[r] = k < K ? load_once(dy + row * K + k) : uint4{0, 0, 0, 0};
        x_loaded[r] = k < K ? *reinterpret_cast<const Loaded*>(x + row * pitch + k) : Loaded{};
    }
    const float norm = rstd[row];
#if CODES
    const float unit = scale[row];
    const auto normalized = [&](int r) { return decoded(x_loaded[r], unit); };  // times weight
#else
    const Values norms = {norm, norm, norm, norm, norm, norm, norm, norm};
    const auto normalized = [&](int r) { return times(values(x_loaded[r]), norms); };
#endif
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        Values t = values(dy_loaded[r]);
        if (!CODES) t = times(t, floats(weight + (column(r) < K ? column(r) : 0)));
        const Values v = normalized(r);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += t.at[i] * v.at[i];
    }
    leave_sum(sum, sum_of_warp);
    __syncthreads();
    const float mean = take_sum(sum_of_warp) / float(K);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = column(r);
        if (k >= K) continue;
        const Values d = values(dy_loaded[r]), w = floats(weight + k), v = normalized(r);
        Values result;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float xhat = v.at[i];
            if (CODES) xhat = fabsf(w.at[i]) > 1e-30f ? xhat * reciprocal_approximately(w.at[i]) : 0.0f;
            result.at[i] = norm * (d.at[i] * w.at[i] - xhat * mean);
        }
        uint4 out = rounded(result);
        if (residual != nullptr) {
            const Values own = values(out), other = values(load_once(residual + row * K + k));
#pragma unroll
            for (int i = 0; i < 8; ++i) result.at[i] = own.at[i] + other.at[i];
            out = rounded(result);
        }
        *reinterpret_cast<uint4*>(dx + row * K + k) = out;
    }
}
