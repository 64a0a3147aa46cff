// 16-bit x [M, K] -> E4M3 codes and float32 scales, per token or per group of 128: bit for bit what formats.reference says.
//
// scale = amax / 448 over the finite values, at least 2**-126, 1 where all are zero; code = RNE(x / scale), saturated,
// correctly rounded quotients. FOLD multiplies column k by columns[k] in float32 first: with the scales of W's rows there, dX needs
// only W's codes (dX = (dY * s) . codes). NORM (with the weight of an RMSNorm in columns) multiplies the token's scale by
// rstd = (mean(x^2) + epsilon)^-1/2 and stores rstd: the codes of a normalized row are those of x * weight, so the
// normalized values are never written. PARTS up to 3: the row is that many matrices beside each other. ADD (with one part,
// at most four rounds): `second` is added to x first, and the sum, rounded to 16 bit, is written to `total` [M, K].
//
// A thread takes 8 values of a row in each of ROUNDS rounds and keeps them in registers, so x is read once; where that
// are too many, the second look is at the cache. Compiled per variant with: NAME, X_BF16, GROUPED (0 token, 1 group of 128),
// FOLD, THREADS, ROUNDS, and for tokens PARTS, NORM, ADD, STAGES and BLOCKS a multiprocessor. Needs widths and pitch % 8 == 0,
// rows on 16-byte boundaries, and for tokens K <= 8 * THREADS * ROUNDS; more than one stage needs at most four rounds.
#include "rows.cuh"

#if GROUPED

// 16 lanes a group, ROUNDS rows; scale of (row, group) at row * row_stride + group * group_stride: cuBLAS wants them
// column by column.
KERNEL(THREADS, 1)
NAME(const u16* x, const float* columns, u8* codes, float* scale, i64 M, int K, i64 x_stride, i64 row_stride,
     i64 group_stride) {
    wait_for_previous_kernel();
    SHARED float found[THREADS / 16][ROUNDS];
    const int groups = (K + 127) / 128, lane = threadIdx.x % 16;
    const int group = blockIdx.y * (THREADS / 16) + threadIdx.x / 16, k = group * 128 + lane * 8;
    const i64 first = i64(blockIdx.x) * ROUNDS;
    uint4 loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
        loaded[r] = first + r < M && k < K ? load_once(x + (first + r) * x_stride + k) : uint4{0, 0, 0, 0};
    Values by;
    if (FOLD) by = floats(columns + (k < K ? k : 0));
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 row = first + r;
        Values v = values(loaded[r]);
        if (FOLD) v = times(v, by);
        const Scale s = scale_of_group(v);
        if (row < M && k < K) {
            if (FOLD)
                store_codes(codes + row * K + k, v, s);
            else
                store_codes(codes + row * K + k, loaded[r], reciprocal_of(s));
        }
        if (lane == 0) found[threadIdx.x / 16][r] = s.value;
    }
    // Scales that lie beside each other are written beside each other.
    __syncthreads();
    for (int i = threadIdx.x; i < ROUNDS * (THREADS / 16); i += THREADS) {
        const bool by_rows = group_stride == 1;
        const int r = by_rows ? i / (THREADS / 16) : i % ROUNDS, at = by_rows ? i % (THREADS / 16) : i / ROUNDS;
        const i64 row = first + r, of = blockIdx.y * (THREADS / 16) + at;
        if (row < M && of < groups) scale[row * row_stride + of * group_stride] = found[at][r];
    }
}

#else

#define IN_REGISTERS (ROUNDS <= 4)

DEVICE uint4 sum_of(const uint4& one, const uint4& other) {
    Values v = values(one);
    const Values w = values(other);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] += w.at[i];
    return rounded(v);
}

// A block takes every gridDim.x-th token. STAGES 1: it loads a row when it needs it; more: rows are on their way into
// shared memory (16 * THREADS * ROUNDS bytes each, with ADD twice that) while others are worked on, and the columns stay in registers.
// A part that is absent has the end of the one before.
KERNEL(THREADS, BLOCKS)
NAME(const u16* x, const u16* second, const u16* third, const float* columns, u8* codes, float* scale, float* rstd,
     float epsilon, int first_end, int second_end, i64 M, int K, i64 pitch, i64 x_stride, i64 second_stride,
     i64 third_stride, u16* total) {
    wait_for_previous_kernel();
    SHARED u32 amax_of_warp[2][WARPS], rare[WARPS];
    SHARED float sum_of_warp[2][WARPS];
    DYNAMIC_SHARED(staged);
    const auto column = [](int r) { return (r * THREADS + int(threadIdx.x)) * 8; };
    const auto source = [&](i64 row, int k) {
        if (PARTS > 2 && k >= second_end) return third + row * third_stride + (k - second_end);
        if (PARTS > 1 && k >= first_end) return second + row * second_stride + (k - first_end);
        return x + row * x_stride + k;
    };
    const auto stage = [&](i64 row, int at) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (row < M && column(r) < K) {
                uint4* to = staged + (at * ROUNDS + r) * THREADS + threadIdx.x;
                copy_later(to, source(row, column(r)));
                if (ADD) copy_later(to + STAGES * ROUNDS * THREADS, second + row * second_stride + column(r));
            }
        end_of_copies();
    };
#if FOLD && STAGES > 1
    Values by[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) by[r] = floats(columns + (column(r) < K ? column(r) : 0));
    const auto folded = [&](const Values& v, int r) { return times(v, by[r]); };
#else
    const auto folded = [&](const Values& v, int r) {
        return FOLD ? times(v, floats(columns + (column(r) < K ? column(r) : 0))) : v;
    };
#endif
#if STAGES > 1
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) stage(blockIdx.x + i64(i) * gridDim.x, i);
#endif
    int turn = 0;
    for (i64 row = blockIdx.x; row < M; row += gridDim.x, ++turn) {
#if IN_REGISTERS
        uint4 loaded[ROUNDS];
#if STAGES > 1
        wait_for_copies<STAGES - 2>();
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const uint4* from = staged + (turn % STAGES * ROUNDS + r) * THREADS + threadIdx.x;
            loaded[r] = column(r) < K ? from[0] : uint4{0, 0, 0, 0};
            if (ADD && column(r) < K) loaded[r] = sum_of(loaded[r], from[STAGES * ROUNDS * THREADS]);
        }
        stage(row + i64(STAGES - 1) * gridDim.x, (turn + STAGES - 1) % STAGES);
#else
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            loaded[r] = column(r) < K ? load_once(source(row, column(r))) : uint4{0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (ADD && column(r) < K)
                loaded[r] = sum_of(loaded[r], load_once(second + row * second_stride + column(r)));
#endif
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (ADD && column(r) < K) *reinterpret_cast<uint4*>(total + row * K + column(r)) = loaded[r];
        const auto at = [&](int r) { return loaded[r]; };
#else
        const auto at = [&](int r) {
            return column(r) < K ? load_shared_by_all(source(row, column(r))) : uint4{0, 0, 0, 0};
        };
#endif
        float amax = 0.0f, squares = 0.0f;
#pragma unroll (IN_REGISTERS ? ROUNDS : 1)
        for (int r = 0; r < ROUNDS; ++r) {
            const Values v = values(at(r));
            if (NORM) {
#pragma unroll
                for (int i = 0; i < 8; ++i) squares += v.at[i] * v.at[i];
            }
            amax = larger(amax, amax_of(folded(v, r)));
        }
        leave_amax(amax, amax_of_warp[turn % 2]);
        if (NORM) leave_sum(squares, sum_of_warp[turn % 2]);
        __syncthreads();
        const Scale s = scale_of_row(take_amax(amax_of_warp[turn % 2]), rare, [&] {
            float finite = 0.0f;
#pragma unroll (IN_REGISTERS ? ROUNDS : 1)
            for (int r = 0; r < ROUNDS; ++r) finite = larger(finite, finite_amax(folded(values(at(r)), r)));
            return finite;
        });
#if !FOLD
        const Reciprocal by = reciprocal_of(s);
#endif
#pragma unroll (IN_REGISTERS ? ROUNDS : 1)
        for (int r = 0; r < ROUNDS; ++r)
            if (column(r) < K)
#if FOLD
                store_codes(codes + row * pitch + column(r), folded(values(at(r)), r), s);
#else
                store_codes(codes + row * pitch + column(r), at(r), by);
#endif
        if (threadIdx.x < 32) {
            float norm = 1.0f;
            if (NORM) norm = 1.0f / sqrtf(take_sum(sum_of_warp[turn % 2]) / float(K) + epsilon);
            if (threadIdx.x == 0) {
                scale[row] = s.value * norm;
                if (NORM) rstd[row] = norm;
            }
        }
    }
}

#endif
