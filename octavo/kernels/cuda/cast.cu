// 16-bit x [M, K] -> E4M3 codes with given scales, or with one scale for all of x; bit for bit what formats.reference says.
//
// AMAX: the largest finite magnitude of every gridDim.x-th row to partial[block]. Else codes = RNE(x / scale), saturated,
// correctly rounded quotients, with SCALES: 0 scale[0], 1 scale[row], 2 scale[row, group of 128], 3 amax / 448 over
// partial[count], which block 0 stores to scale.
//
// Compiled per variant with: NAME, X_BF16, AMAX, SCALES, THREADS, ROUNDS. Needs K % 8 == 0, rows on 16-byte boundaries,
// count <= THREADS.
#include "rows.cuh"

#if AMAX

KERNEL(THREADS, 1) NAME(const u16* x, float* partial, int M, int K, i64 x_stride) {
    SHARED u32 scratch[WARPS];
    float amax = 0.0f;
    for (int row = blockIdx.x; row < M; row += gridDim.x) {
#pragma unroll 4
        for (int k = threadIdx.x * 8; k < K; k += THREADS * 8)
            amax = larger(amax, finite_amax(values(load_shared_by_all(x + row * x_stride + k))));
    }
    leave_amax(amax, scratch);
    __syncthreads();
    amax = take_amax(scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = amax;
}

#else

// Any scale: where its reciprocal is no good approximation, every quotient is divided.
DEVICE Scale given(float scale) {
    const float nan = float_of_bits(0x7FC00000u), limit = float_of_bits(0x71800000u);  // 2**100
    if (!(scale > 1.0f / limit && scale < limit)) return {scale, nan, nan};
    const float inverse = reciprocal_approximately(scale);
    return {scale, inverse * (1.0f - 4.76837158203125e-7f), inverse * -(1.0f + 4.76837158203125e-7f)};
}

KERNEL(THREADS, 1)
NAME(const u16* x, float* scale, const float* partial, u8* codes, int K, int count, i64 x_stride) {
    const i64 row = blockIdx.x;
    const int first = (blockIdx.y * ROUNDS * THREADS + threadIdx.x) * 8;
    uint4 loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = first + r * THREADS * 8;
        if (k < K) loaded[r] = load_once(x + row * x_stride + k);
    }
#if SCALES == 3
    SHARED u32 scratch[WARPS];
    leave_amax(threadIdx.x < count ? partial[threadIdx.x] : 0.0f, scratch);
    __syncthreads();
    const Scale whole = scale_of(take_amax(scratch));
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) scale[0] = whole.value;
#elif SCALES < 2
    const Scale whole = given(scale[SCALES == 1 ? row : 0]);
#endif
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = first + r * THREADS * 8;
        if (k >= K) continue;
#if SCALES == 2
        const Scale whole = given(scale[row * ((K + 127) / 128) + k / 128]);
#endif
        store_codes(codes + row * K + k, values(loaded[r]), whole);
    }
}

#endif
