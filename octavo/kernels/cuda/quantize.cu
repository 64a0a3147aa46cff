// 16-bit x [M, K] -> E4M3 codes and float32 scales, per token or per group of 128: bit for bit what formats.reference says.
//
// scale = amax / 448 over the finite values, at least 2**-126, 1 where all are zero; code = RNE(x / scale), saturated,
// IEEE divisions. FOLD multiplies column k by columns[k] in float32 first: with the scales of W's rows there, dX needs
// only W's codes (dX = (dY * s) . codes).
//
// A thread holds 8 values of a row for each of ROUNDS rounds in registers, so x is read once. Compiled per variant with:
// NAME, X_BF16, GROUPED (0 token, 1 group of 128), FOLD, ROUNDS. Needs K % 8 == 0, rows on 16-byte boundaries, and for
// tokens K <= 2048 * ROUNDS.
#include "device.cuh"

#define THREADS 256

struct Values {
    float at[8];
};

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }

DEVICE Values values(const uint4& loaded, const float* columns) {
    const u32 word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    Values v;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        v.at[i] = float_of(u16(word[i / 2] >> (i % 2 * 16)));
#if FOLD
        v.at[i] *= columns[i];
#endif
    }
    return v;
}

DEVICE float finite_amax(const Values& v) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 magnitude = bits_of_float(v.at[i]) & 0x7FFFFFFFu;
        const float finite = magnitude < 0x7F800000u ? float_of_bits(magnitude) : 0.0f;
        amax = finite > amax ? finite : amax;
    }
    return amax;
}

DEVICE float scale_of(float amax) {
    const float scale = amax / 448.0f;
    const float smallest_normal = float_of_bits(0x00800000u);
    return amax > 0.0f ? (scale > smallest_normal ? scale : smallest_normal) : 1.0f;
}

DEVICE void store(u8* to, const Values& v, float scale) {
    u32 word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i / 4] |= e4m3_of_float(v.at[i] / scale) << (i % 4 * 8);
    *reinterpret_cast<uint2*>(to) = uint2{word[0], word[1]};
}

DEVICE float amax_of_lanes(float amax, int lanes) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
        const float other = exchange(amax, mask);
        amax = other > amax ? other : amax;
    }
    return amax;
}

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
        const Values v = values(loaded[r], columns + (inside ? k : 0));
        const float s = scale_of(amax_of_lanes(finite_amax(v), 16));
        if (inside) store(codes + row * K + k, v, s);
        if (row < M && lane == 0) scale[row * row_stride + in_row * group_stride] = s;
    }
}

#else

// One block a token.
KERNEL(THREADS, 1)
NAME(const u16* x, const float* columns, u8* codes, float* scale, i64 M, int K, i64 x_stride, i64 row_stride,
     i64 group_stride) {
    SHARED float amax_of_warp[THREADS / 32];
    const i64 row = blockIdx.x;
    uint4 loaded[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        loaded[r] = k < K ? load_once(x + row * x_stride + k) : uint4{0, 0, 0, 0};
    }
    float amax = 0.0f;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        const float found = finite_amax(values(loaded[r], columns + (k < K ? k : 0)));
        amax = found > amax ? found : amax;
    }
    amax = amax_of_lanes(amax, 32);
    if (threadIdx.x % 32 == 0) amax_of_warp[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) amax = amax_of_warp[warp] > amax ? amax_of_warp[warp] : amax;
    const float s = scale_of(amax);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        if (k < K) store(codes + row * K + k, values(loaded[r], columns + k), s);
    }
    if (threadIdx.x == 0) scale[row * row_stride] = s;
}

#endif
