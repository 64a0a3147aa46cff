// One pass over a gradient dY, bfloat16 [M, N], for an adapter of rank r <= 16 * RANKS: dY B [M, r] and dY^T low [N, r].
//
// A block takes 8 * WIDTH columns and `chunk` tokens, sixteen at a time. A lane loads 8 columns of tokens g and g + 8: they
// are A of mma.m16n8k16 for dY B, and with 8 x 8 values transposed between lanes B of low^T dY, whose sums stay in
// registers. The same column has the same place in all operands, which is all that matters. Sums of both products are of
// a block's own columns and tokens: float32 [strip, M, r] and [chunk, N, r], to be added by whoever wants the same bits
// every time. B float32, low bfloat16 with rows low_pitch apart.
// Compiled with: NAME, RANKS. Needs N and dy_stride % 8 == 0, dY on 16 bytes.
#include "device.cuh"

#define WARPS 8
#define WIDTH (128 / RANKS)  // columns of a warp
#define PARTS (WIDTH / 32)
#define BUFFERS (RANKS > 2 ? 1 : 2)  // static shared memory is 48 KiB at most

struct Words {
    u32 at[4];
};

KERNEL(32 * WARPS, 1)
NAME(const u16* dy, const float* b, const u16* low, float* du, float* db, i64 M, int N, int r, i64 dy_stride,
     i64 low_pitch, int chunk) {
    SHARED float of_warp[BUFFERS][WARPS][16][16 * RANKS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column0 = (blockIdx.x * WARPS + warp) * WIDTH + 8 * t;
    const i64 first = i64(blockIdx.y) * chunk, end = first + chunk < M ? first + chunk : M;
    const auto load = [=](i64 token, int part) {
        const int column = column0 + 32 * part;
        if (token >= end || column >= N) return Words{{0, 0, 0, 0}};
        const uint4 v = load_once(dy + token * dy_stride + column);
        return Words{{v.x, v.y, v.z, v.w}};
    };
    const auto low_pair = [=](i64 token, int j) {  // ranks j and j + 1
        const u16* from = low + token * low_pitch + j;
        const u32 one = token < end && j < r ? from[0] : 0, other = token < end && j + 1 < r ? from[1] : 0;
        return one | other << 16;
    };
    // B as it is multiplied: column pairs 4s + (0, 1) and 4s + (2, 3) of the lane's eight, rank 8n + g.
    u32 right[PARTS][2][2 * RANKS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int n = 0; n < 2 * RANKS; ++n)
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const int column = column0 + 32 * part + 4 * s + 2 * pair, j = 8 * n + g;
                    const bool inside = j < r && column < N;
                    const u32 one = bf16_of_float(inside ? b[i64(column) * r + j] : 0.0f);
                    right[part][s][n][pair] = one | u32(bf16_of_float(inside ? b[i64(column + 1) * r + j] : 0.0f)) << 16;
                }
    float of_b[RANKS][PARTS][2][2][4] = {};  // [rank / 16][part][s][pair]
    Words next[PARTS][2];  // on their way while others are worked on
    u32 next_low[RANKS][2][2];
    const auto fetch = [&](i64 begin) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i64 token = begin + g + 8 * half;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) next[part][half] = load(token, part);
#pragma unroll
            for (int q = 0; q < RANKS; ++q)
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) next_low[q][half][upper] = low_pair(token, 16 * q + 8 * upper + 2 * t);
        }
    };
    fetch(first);
    int turn = 0;
    for (i64 begin = first; begin < end; begin += 16, ++turn) {
        Words now[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) now[part][0] = next[part][0], now[part][1] = next[part][1];
        u32 left[RANKS][4];  // low^T: rank g or g + 8, tokens 2t, 2t + 1 or 8 more
#pragma unroll
        for (int q = 0; q < RANKS; ++q)
#pragma unroll
            for (int i = 0; i < 4; ++i) left[q][i] = turned(next_low[q][i / 2][i % 2]);
        fetch(begin + 16);
        float of_u[2 * RANKS][4] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const u32 a[4] = {now[part][0].at[2 * s], now[part][1].at[2 * s], now[part][0].at[2 * s + 1],
                                  now[part][1].at[2 * s + 1]};
#pragma unroll
                for (int n = 0; n < 2 * RANKS; ++n) mma_bf16(of_u[n], a, right[part][s][n]);
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const u32 across[2] = {turned(a[2 * pair]), turned(a[2 * pair + 1])};
#pragma unroll
                    for (int q = 0; q < RANKS; ++q) mma_bf16(of_b[q][part][s][pair], left[q], across);
                }
            }
#pragma unroll
        for (int n = 0; n < 2 * RANKS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) of_warp[turn % BUFFERS][warp][g + 8 * (i / 2)][8 * n + 2 * t + i % 2] = of_u[n][i];
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * 16 * RANKS; i += 32 * WARPS) {
            const int token = i / (16 * RANKS), j = i % (16 * RANKS);
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += of_warp[turn % BUFFERS][w][token][j];
            if (j < r && begin + token < end) du[(i64(blockIdx.x) * M + begin + token) * r + j] = sum;
        }
        if (BUFFERS == 1) __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < RANKS; ++q)
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int pair = 0; pair < 2; ++pair)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int j = 16 * q + g + 8 * (i / 2), column = column0 + 32 * part + 4 * s + 2 * pair + i % 2;
                        if (j < r && column < N) db[(i64(blockIdx.y) * N + column) * r + j] = of_b[q][part][s][pair][i];
                    }
}
