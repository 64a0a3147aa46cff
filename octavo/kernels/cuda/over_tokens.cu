// Low-rank gradients times an input that is there as E4M3 codes, summed over tokens: low^T x, [R, K], R <= 16 * RANKS.
//
// low 16 bit [M, R] times the scale of each token, bfloat16, is A of mma.m16n8k16, the codes are B: tokens are the
// contracted dimension and lie in different rows, so that a lane loads 8 columns of 4 tokens and turns 4 x 4 bytes. Which
// tokens and columns a lane has is free as long as A and the result agree: tokens 4t to 4t + 3 of sixteen, columns
// 8g to 8g + 7 of sixty-four, one for each of 8 products. A block takes 256 columns and `chunk` tokens and writes its own
// sums, float32 [chunk, R, K]: whoever adds them has the same bits every time.
// GROUPED: scales are per group of 128 columns, those of a group `group_stride` apart, not per token.
// Compiled with: NAME, X_BF16, RANKS, ALIGNED (rows of low on 16 bytes, R % 8 == 0), GROUPED. Needs K and pitch % 8 == 0, chunk % 128 == 0. NaN codes read as +-480.
#include "device.cuh"

#define THREADS 128  // one for each token of a stage
#define SETS (GROUPED ? 2 : 1)  // of scales that a block needs
#define STAGE 128  // tokens of low in shared memory
#define PITCH (STAGE + 16)  // 8 words past a multiple of 32: the rows of a half-warp are in different banks

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }

struct Words {
    u32 at[2];
};

struct Eight {
    u16 at[8];
};

// Ranks j to j + 7 of a token, zeros beyond R.
DEVICE Eight eight_of(const u16* row, int j, int R) {
    Eight v = {};
#if ALIGNED
    if (j >= R) return v;
    const uint4 loaded = *reinterpret_cast<const uint4*>(row + j);
    const u32 word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) v.at[i] = u16(word[i / 2] >> (i % 2 * 16));
#else
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (j + i < R) v.at[i] = row[j + i];
#endif
    return v;
}

// Four rows of 4 codes -> four columns of 4.
DEVICE void turn(u32 (&w)[4]) {
    const u32 even01 = permute(w[0], w[1], 0x6240), odd01 = permute(w[0], w[1], 0x7351);
    const u32 even23 = permute(w[2], w[3], 0x6240), odd23 = permute(w[2], w[3], 0x7351);
    w[0] = permute(even01, even23, 0x5410), w[1] = permute(odd01, odd23, 0x5410);
    w[2] = permute(even01, even23, 0x7632), w[3] = permute(odd01, odd23, 0x7632);
}

KERNEL(THREADS, 1)
NAME(const u8* codes, const float* scale, const u16* low, float* sums, i64 M, int K, int R, i64 pitch, i64 low_pitch,
     i64 group_stride, int chunk) {
    wait_for_previous_kernel();
    SHARED u16 turned[SETS][16 * RANKS][PITCH];  // low times scale, tokens along a row
    const int set = GROUPED ? threadIdx.x / 64 : 0;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column = blockIdx.x * 256 + threadIdx.x / 32 * 64 + g * 8;
    const i64 first = i64(blockIdx.y) * chunk, end = first + chunk < M ? first + chunk : M;
    const auto load = [=](i64 token) {
        if (token >= end || column >= K) return Words{{0, 0}};
        const uint2 v = *reinterpret_cast<const uint2*>(codes + token * pitch + column);
        return Words{{v.x, v.y}};
    };
    float sum[RANKS][8][4] = {};
    Eight ahead[2 * RANKS];  // what the next stage and the next sixteen tokens need is on its way
    float unit[SETS];
    const auto fetch = [&](i64 token) {
#pragma unroll
        for (int i = 0; i < 2 * RANKS; ++i) ahead[i] = eight_of(low + token * low_pitch, 8 * i, token < end ? R : 0);
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const bool there = token < end && (!GROUPED || int(blockIdx.x) * 256 + s * 128 < K);
            unit[s] = there ? scale[GROUPED ? (i64(blockIdx.x) * 2 + s) * group_stride + token : token] : 0.0f;
        }
    };
    Words next[4];
    const auto advance = [&](i64 token) {
#pragma unroll
        for (int i = 0; i < 4; ++i) next[i] = load(token + 4 * t + i);
    };
    fetch(first + threadIdx.x);
    advance(first);
    for (i64 begin = first; begin < end; begin += STAGE) {
        __syncthreads();
#pragma unroll
        for (int s = 0; s < SETS; ++s)
#pragma unroll
            for (int j = 0; j < 16 * RANKS; ++j)
                turned[s][j][threadIdx.x] = bf16_of_float(float_of(ahead[j / 8].at[j % 8]) * unit[s]);
        __syncthreads();
        fetch(begin + STAGE + threadIdx.x);
#pragma unroll 2
        for (int group = 0; group < STAGE; group += 16) {
            Words row[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) row[i] = next[i];
            advance(begin + group + 16);
            u32 b[8][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 w[4] = {row[0].at[half], row[1].at[half], row[2].at[half], row[3].at[half]};
                turn(w);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Pairs pairs = e4m3_to_bf16(w[i]);
                    b[4 * half + i][0] = pairs.low, b[4 * half + i][1] = pairs.high;
                }
            }
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                const uint2 upper = *reinterpret_cast<const uint2*>(&turned[set][16 * r + g][group + 4 * t]);
                const uint2 lower = *reinterpret_cast<const uint2*>(&turned[set][16 * r + g + 8][group + 4 * t]);
                const u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
                for (int i = 0; i < 8; ++i) mma_bf16(sum[r][i], a, b[i]);
            }
        }
    }
    // Row g and g + 8, columns 2t and 2t + 1 of product i: column 8 * (2t) + i of the warp's sixty-four, and 8 further.
    const int out = blockIdx.x * 256 + threadIdx.x / 32 * 64;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
#pragma unroll
        for (int which = 0; which < 4; ++which) {
            const int j = 16 * r + g + 8 * (which / 2), from = out + 8 * (2 * t + which % 2);
            if (j >= R || from >= K) continue;
            float* to = sums + (i64(blockIdx.y) * R + j) * K + from;
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                *reinterpret_cast<float4*>(to + i) =
                    float4{sum[r][i][which], sum[r][i + 1][which], sum[r][i + 2][which], sum[r][i + 3][which]};
        }
    }
}
