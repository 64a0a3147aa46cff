// Up to three 16-bit matrices beside each other, [M, K] -> E4M3 codes and float32 scales per group of 128 of a row.
//
// Codes and scales as quantize.cu makes them. NORM: columns holds the weight of an RMSNorm; the values are x * weight, the
// scales are multiplied by rstd = (mean(x^2) + epsilon)^-1/2, and rstd is stored. Codes are `pitch` bytes a row apart, the
// scales of a group `group_stride` floats: column by column, as cuBLAS wants them. One block a row, 16 lanes a group; a
// part that is absent has the end of the one before.
// Compiled with: NAME, X_BF16, NORM, THREADS, ROUNDS. Needs widths % 128 == 0, K <= 8 * THREADS * ROUNDS, rows on 16 bytes.
#include "rows.cuh"

KERNEL(THREADS, 1)
NAME(const u16* x, const u16* second, const u16* third, const float* columns, u8* codes, float* scale, float* rstd,
     float epsilon, int first_end, int second_end, int K, i64 pitch, i64 group_stride, i64 x_stride, i64 second_stride,
     i64 third_stride) {
    wait_for_previous_kernel();
    SHARED float sum_of_warp[WARPS];
    const i64 row = blockIdx.x;
    uint4 loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + int(threadIdx.x)) * 8;
        const u16* from = k >= second_end  ? third + row * third_stride + (k - second_end)
                          : k >= first_end ? second + row * second_stride + (k - first_end)
                                           : x + row * x_stride + k;
        loaded[r] = k < K ? load_once(from) : uint4{0, 0, 0, 0};
    }
    float squares = 0.0f, unit[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + int(threadIdx.x)) * 8;
        Values v = values(loaded[r]);
        if (NORM) {
#pragma unroll
            for (int i = 0; i < 8; ++i) squares += v.at[i] * v.at[i];
            v = times(v, floats(columns + (k < K ? k : 0)));
        }
        const Scale s = scale_of_group(v);
        unit[r] = s.value;
        if (k < K) {
            if (NORM)
                store_codes(codes + row * pitch + k, v, s);
            else
                store_codes(codes + row * pitch + k, loaded[r], reciprocal_of(s));
        }
    }
    float norm = 1.0f;
#if NORM
    leave_sum(squares, sum_of_warp);
    __syncthreads();
    norm = 1.0f / sqrtf(take_sum(sum_of_warp) / float(K) + epsilon);
    if (threadIdx.x == 0) rstd[row] = norm;
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + int(threadIdx.x)) * 8;
        if (k < K && threadIdx.x % 16 == 0) scale[k / 128 * group_stride + row] = unit[r] * norm;
    }
}
