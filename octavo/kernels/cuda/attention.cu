// Attention of one new token to a cache of keys and values, read once as it lies: the first of two phases.
//
// q 16 bit [B, kv_heads * group, HEAD]; keys and values [B, kv_heads, capacity, HEAD], E4M3 codes or 16 bit. A block takes
// one split of the tokens for up to 8 of the query heads that share a key head, so every byte is loaded once for them.
// Its warps walk the split in steps of 16 * TILES tokens with a running softmax in float32; what they found meets in
// shared memory in a fixed order and goes to `partial`, which attention_combine.cu sums: no atomics, the same bits every
// time.
//
// Both products are mma.m16n8k16 with heads as columns. Keys are rows: a lane holds the quarter of HEAD that its t names,
// of tokens g and g + 8, and q is loaded in the same order. Values are read along HEAD too, an eighth by each g, of tokens
// 2t, 2t + 1, 2t + 8, 2t + 9: one byte permutation makes a pair of tokens of the codes at one position, as cheap as the
// pair of neighbours that decoding makes anyway, and that is the transposed operand. A value that is NaN stays NaN.
//
// Compiled per variant with: NAME, X_BF16, HEAD (a multiple of 32), WARPS, TILES, KV (0 codes and one scale each for keys
// and values, 1 codes and scales per token and head, 2 16 bit). Needs everything on 16-byte boundaries.
#include "attention.cuh"

#define STEP (16 * TILES)
#define KEY_WORDS (HEAD / (KV == 2 ? 8 : 16))     // a lane's part of a key
#define VALUE_WORDS (HEAD / (KV == 2 ? 16 : 32))  // and of a value
#define ELEMENT (KV == 2 ? 2 : 1)
// With scales per token the weights carry them, and may need the range of bfloat16.
#define WEIGHTS_BF16 (KV == 0 ? 0 : KV == 1 ? 1 : X_BF16)
#define KEY_UNIT (KV == 2 || X_BF16 ? 1.0f : 256.0f)
#define VALUE_UNIT (KV == 2 || WEIGHTS_BF16 ? 1.0f : 256.0f)
#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY float_of_bits(0xFF800000u)
#define PITCH (HEAD + 4)

template <int N>
struct Words {
    u32 at[N];
};

template <int N>
DEVICE Words<N> load(const u8* from) {
    Words<N> w;
    if (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            const uint4 v = load_once(from + 16 * i);
            w.at[4 * i % N] = v.x, w.at[(4 * i + 1) % N] = v.y, w.at[(4 * i + 2) % N] = v.z, w.at[(4 * i + 3) % N] = v.w;
        }
    } else if (N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const uint2 v = reinterpret_cast<const uint2*>(from)[i];
            w.at[2 * i % N] = v.x, w.at[(2 * i + 1) % N] = v.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) w.at[i] = reinterpret_cast<const u32*>(from)[i];
    }
    return w;
}

template <int N>
DEVICE Words<N> zeros() {
    Words<N> w;
#pragma unroll
    for (int i = 0; i < N; ++i) w.at[i] = 0;
    return w;
}

DEVICE void mma(bool bf16, float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if (bf16)
        mma_bf16(c, a, b);
    else
        mma_fp16(c, a, b);
}

// The top bit of every byte that is a NaN code.
DEVICE u32 nan_codes(u32 codes) { return ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u; }

// The codes at byte `place` of two tokens as a pair of 16-bit floats.
DEVICE u32 pair_of_tokens(u32 first, u32 second, int place) {
    const u32 spread = permute(first, second, 0x4000u + 0x1010u * place);
#if WEIGHTS_BF16
    const u32 pair = multiply_bf16x2(shifted_pair(spread, 4, 0x07F007F0u), 0x7B807B80u);
#else
    const u32 pair = shifted_pair(spread, 1, 0x3F803F80u);
#endif
    return pair;
}

DEVICE u32 nan_pair(u32 first, u32 second, int place) {
    const u32 low = nan_codes(first) >> (8 * place + 7) & 1u, high = nan_codes(second) >> (8 * place + 7) & 1u;
    return low * 0x7FFFu | high * 0x7FFF0000u;
}

// One 16-token tile: scores of its tokens g and g + 8 for heads 2t and 2t + 1.
DEVICE void score(float (&s)[4], const Words<KEY_WORDS> (&key)[2], const u32 (&q)[HEAD / 8]) {
    u32 poison[2] = {0, 0};
#if KV < 2
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int w = 0; w < KEY_WORDS; ++w) poison[r] |= nan_codes(key[r].at[w]);
        poison[r] = poison[r] != 0 ? 0x7FFF7FFFu : 0;
    }
#endif
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
        u32 a[4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#if KV == 2
            a[r] = key[r].at[2 * step], a[r + 2] = key[r].at[2 * step + 1];
#else
            const Pairs pairs = X_BF16 ? e4m3_to_bf16(key[r].at[step]) : e4m3_to_fp16(key[r].at[step]);
            a[r] = step == 0 ? pairs.low | poison[r] : pairs.low, a[r + 2] = pairs.high;
#endif
        }
        const u32 b[2] = {q[2 * step], q[2 * step + 1]};
        mma(X_BF16, s, a, b);
    }
}

// sum[j] += the tile's values, rows 2j and 2j + 1 of the eighth of HEAD that g names, times the weights of its tokens.
DEVICE void add_values(float (&sum)[HEAD / 16][4], const Words<VALUE_WORDS> (&value)[4], const u32 (&weight)[2]) {
#pragma unroll
    for (int w = 0; w < VALUE_WORDS; ++w) {
#if KV == 2
        u32 a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            a[2 * half] = permute(value[2 * half].at[w], value[2 * half + 1].at[w], 0x5410u);
            a[2 * half + 1] = permute(value[2 * half].at[w], value[2 * half + 1].at[w], 0x7632u);
        }
        mma(WEIGHTS_BF16, sum[w], a, weight);
#else
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) found |= nan_codes(value[i].at[w]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // registers: both places of tokens 2t and 2t + 1, then of 2t + 8 and 2t + 9
                const u32 first = value[i / 2 * 2].at[w], second = value[i / 2 * 2 + 1].at[w];
                a[i] = pair_of_tokens(first, second, 2 * j + i % 2);
                if (found != 0) a[i] |= nan_pair(first, second, 2 * j + i % 2);
            }
            mma(WEIGHTS_BF16, sum[2 * w + j], a, weight);
        }
#endif
    }
}

DEVICE float over_tokens(float value, bool largest) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
        const float other = exchange(value, mask);
        value = largest ? fmaxf(value, other) : value + other;
    }
    return value;
}

KERNEL(32 * WARPS, 1)
NAME(const u16* q, const u8* keys, const u8* values, const float* k_scale, const float* v_scale, const u8* mask,
     const int* length, float* partial, int kv_heads, int group, i64 batch_stride, i64 head_stride, i64 mask_stride,
     int splits, int added, int window, float scale) {
    SHARED float sums[WARPS][8][PITCH];
    SHARED float largest[WARPS][8], total[WARPS][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int eights = (group + 7) / 8;
    const int head_of_group = int(blockIdx.y) % eights * 8, kv = int(blockIdx.y) / eights;
    const int batch = kv / kv_heads, heads = group - head_of_group < 8 ? group - head_of_group : 8;
    wait_for_previous_kernel();
    const Splits range = splits_of(length, added, window, splits, WARPS * STEP);
    if (int(blockIdx.x) >= range.count) return;
    const int begin = range.first + int(blockIdx.x) * range.size;
    const int end = begin + range.size < range.last ? begin + range.size : range.last;

    const i64 origin = batch * batch_stride + kv % kv_heads * head_stride;
    const i64 query_row = i64(kv) * group + head_of_group;
    u32 query[HEAD / 8];
#pragma unroll
    for (int i = 0; i < HEAD / 32; ++i) {
        const u16* from = q + (query_row + g) * HEAD + t * (HEAD / 4) + 8 * i;
        const uint4 v = g < heads ? load_shared_by_all(from) : uint4{0, 0, 0, 0};
        query[4 * i] = v.x, query[4 * i + 1] = v.y, query[4 * i + 2] = v.z, query[4 * i + 3] = v.w;
    }
    const float unit = scale * LOG2_E * KEY_UNIT * (KV == 0 ? k_scale[0] : 1.0f);

    float sum[HEAD / 16][4] = {};
    float highest[2] = {MINUS_INFINITY, MINUS_INFINITY}, mass[2] = {0.0f, 0.0f};
    for (int base = begin + warp * STEP; base < end; base += WARPS * STEP) {
        Words<KEY_WORDS> key[TILES][2];
        Words<VALUE_WORDS> value[TILES][4];
        bool seen[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = base + 16 * i + 8 * r + g;
                seen[i][r] = token < end && (mask == nullptr || mask[batch * mask_stride + token] != 0);
                const u8* from = keys + (origin + i64(token) * HEAD + t * (HEAD / 4)) * ELEMENT;
                key[i][r] = seen[i][r] ? load<KEY_WORDS>(from) : zeros<KEY_WORDS>();
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int token = base + 16 * i + 8 * (r / 2) + 2 * t + r % 2;
                const bool read = token < end && (mask == nullptr || mask[batch * mask_stride + token] != 0);
                const u8* from = values + (origin + i64(token) * HEAD + g * (HEAD / 8)) * ELEMENT;
                value[i][r] = read ? load<VALUE_WORDS>(from) : zeros<VALUE_WORDS>();
            }
        }
        float s[TILES][4], v_unit[TILES][2], highest_now[2] = {highest[0], highest[1]};
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[i][c] = 0.0f;
            score(s[i], key[i], query);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float by = unit;
                v_unit[i][r] = 1.0f;
#if KV == 1
                const i64 at = origin / HEAD + base + 16 * i + 8 * r + g;
                by *= seen[i][r] ? k_scale[at] : 1.0f;
                v_unit[i][r] = seen[i][r] ? v_scale[at] : 0.0f;
#endif
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    s[i][2 * r + h] = seen[i][r] ? s[i][2 * r + h] * by : MINUS_INFINITY;
                    highest_now[h] = fmaxf(highest_now[h], s[i][2 * r + h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            highest_now[h] = over_tokens(highest_now[h], true);
            const float from = highest_now[h] == MINUS_INFINITY ? 0.0f : highest_now[h];
            const float kept = exp2_approximately(highest[h] - from);
            highest[h] = highest_now[h];
            mass[h] *= kept;
#pragma unroll
            for (int j = 0; j < HEAD / 16; ++j) sum[j][h] *= kept, sum[j][h + 2] *= kept;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float weight = exp2_approximately(s[i][2 * r + h] - from);
                    mass[h] += weight;
                    s[i][2 * r + h] = weight * v_unit[i][r];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            u32 weight[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float low = s[i][2 * r], high = s[i][2 * r + 1];
                weight[r] = transpose_8x8(WEIGHTS_BF16 ? bf16_of_float(low) | u32(bf16_of_float(high)) << 16
                                                       : fp16_of_float(low) | u32(fp16_of_float(high)) << 16);
            }
            add_values(sum, value[i], weight);
        }
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        mass[h] = over_tokens(mass[h], false);
        if (g == 0) largest[warp][2 * t + h] = highest[h], total[warp][2 * t + h] = mass[h];
#pragma unroll
        for (int j = 0; j < HEAD / 16; ++j) {
            float* to = &sums[warp][2 * t + h][g * (HEAD / 8) + 2 * j];
            to[0] = sum[j][h], to[1] = sum[j][h + 2];
        }
    }
    __syncthreads();
    const float value_unit = VALUE_UNIT * (KV == 0 ? v_scale[0] : 1.0f);
    for (int at = threadIdx.x; at < heads * HEAD; at += 32 * WARPS) {
        const int head = at / HEAD, d = at % HEAD;
        float top = MINUS_INFINITY, all = 0.0f, result = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, largest[w][head]);
        const float from = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float share = exp2_approximately(largest[w][head] - from);
            all += total[w][head] * share;
            result += sums[w][head][d] * share;
        }
        float* to = partial + ((query_row + head) * splits + blockIdx.x) * (HEAD + 2);
        to[d] = result * value_unit;
        if (d == 0) to[HEAD] = top, to[HEAD + 1] = all;
    }
}
