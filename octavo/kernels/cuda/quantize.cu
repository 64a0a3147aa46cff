// 16-bit x [M, K] -> E4M3 codes and float32 scales, per token or per group of 128: bit for bit what formats.reference says.
//
// scale = amax / 448 over the finite values, at least 2**-126, 1 where all are zero; code = RNE(x / scale), saturated,
// correctly rounded quotients. FOLD multiplies column k by columns[k] in float32 first: with the scales of W's rows there, dX needs
// only W's codes (dX = (dY * s) . codes). NORM (with the weight of an RMSNorm in columns) multiplies the token's scale by
// rstd = (mean(x^2) + epsilon)^-1/2 and stores rstd: the codes of a normalized row are those of x * weight, so the
// normalized values are never written. PARTS up to 3: the row is that many matrices beside each other.
//
// A thread takes 8 values of a row in each of ROUNDS rounds and keeps them in registers, so x is read once; where that
// are too many, the second look is at the cache. Compiled per variant with:
// NAME, X_BF16, GROUPED (0 token, 1 group of 128), FOLD, THREADS, ROUNDS, and for tokens PARTS and NORM. Needs
// widths and pitch % 8 == 0, rows on 16-byte boundaries, and for tokens K <= 8 * THREADS * ROUNDS.
#include "rows.cuh"

#define IN_REGISTERS 4
#define UNROLL (ROUNDS > IN_REGISTERS ? 1 : ROUNDS)

#if GROUPED

// 16 lanes a group; scale of (row, group) at row * row_stride + group * group_stride: cuBLAS wants them column by column.
KERNEL(THREADS, 1)
NAME(const u16* x, const float* columns, u8* codes, float* scale, i64 M, int K, i64 x_stride, i64 row_stride,
     i64 group_stride) {
    const int groups = (K + 127) / 128, lane = threadIdx.x % 16;
    uint4 loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 group = (i64(blockIdx.x) * ROUNDS + r) * (THREADS / 16) + threadIdx.x / 16;
        const i64 row = group / groups;
        const int k = int(group % groups) * 128 + lane * 8;
        loaded[r] = row < M && k < K ? load_once(x + row * x_stride + k) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 group = (i64(blockIdx.x) * ROUNDS + r) * (THREADS / 16) + threadIdx.x / 16;
        const i64 row = group / groups;
        const int in_row = int(group % groups), k = in_row * 128 + lane * 8;
        const bool inside = row < M && k < K;
        Values v = values(loaded[r]);
        if (FOLD) v = times(v, columns + (inside ? k : 0));
        float amax = amax_of_lanes(amax_of(v), 16);
        const bool infinite = amax == INFINITE;  // the same for all lanes of the group, not of the warp
        const float finite = amax_of_lanes(finite_amax(v), 16);
        const Scale s = scale_of(infinite ? finite : amax, infinite);
        if (inside) store_codes(codes + row * K + k, v, s);
        if (row < M && lane == 0) scale[row * row_stride + in_row * group_stride] = s.value;
    }
}

#else

// One block a token, whose codes are `pitch` bytes apart. A part that is absent has the end of the one before.
KERNEL(THREADS, 1)
NAME(const u16* x, const u16* second, const u16* third, const float* columns, u8* codes, float* scale, float* rstd,
     float epsilon, int first_end, int second_end, int K, i64 pitch, i64 x_stride, i64 second_stride,
     i64 third_stride) {
    SHARED float amax_of_warp[2][THREADS / 32];
    const i64 row = blockIdx.x;
    const auto load = [=](int r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        const u16* from = x + row * x_stride + k;
        if (PARTS > 1 && k >= first_end) from = second + row * second_stride + (k - first_end);
        if (PARTS > 2 && k >= second_end) from = third + row * third_stride + (k - second_end);
        return k < K ? load_shared_by_all(from) : uint4{0, 0, 0, 0};
    };
#if ROUNDS > IN_REGISTERS
    const auto at = load;
#else
    uint4 loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) loaded[r] = load(r);
    const auto at = [&](int r) { return loaded[r]; };
#endif
    float amax = 0.0f, squares = 0.0f;
#pragma unroll UNROLL
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        Values v = values(at(r));
        if (NORM) {
#pragma unroll
            for (int i = 0; i < 8; ++i) squares += v.at[i] * v.at[i];
        }
        if (FOLD) v = times(v, columns + (k < K ? k : 0));
        amax = larger(amax, amax_of(v));
    }
    amax = amax_of_block(amax, amax_of_warp[0]);
    const bool infinite = amax == INFINITE;
    if (infinite) {
        amax = 0.0f;
#pragma unroll UNROLL
        for (int r = 0; r < ROUNDS; ++r) {
            const int k = (r * THREADS + threadIdx.x) * 8;
            Values v = values(at(r));
            if (FOLD) v = times(v, columns + (k < K ? k : 0));
            amax = larger(amax, finite_amax(v));
        }
        amax = amax_of_block(amax, amax_of_warp[1]);
    }
    const Scale s = scale_of(amax, infinite);
#pragma unroll UNROLL
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        if (k >= K) continue;
        Values v = values(at(r));
        if (FOLD) v = times(v, columns + k);
        store_codes(codes + row * pitch + k, v, s);
    }
    float norm = 1.0f;
#if NORM
    SHARED float sum_of_warp[THREADS / 32];
    norm = 1.0f / sqrtf(sum_of_block(squares, sum_of_warp) / float(K) + epsilon);
    if (threadIdx.x == 0) rstd[row] = norm;
#endif
    if (threadIdx.x == 0) scale[row] = s.value * norm;
}

#endif
