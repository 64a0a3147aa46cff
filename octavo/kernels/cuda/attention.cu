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
// 2t, 2t + 1, 2t + 8, 2t + 9: a byte permutation makes pairs of tokens of the codes at one position, which is the
// transposed operand. Codes become FP16, which costs least; BF16 queries follow, each head times a power of two that
// brings its largest value below 2^15 (exact down to 2^-29 of it). Weights are FP16, too; with scales per token they carry
// those, relative to the largest so far.
//
// The codes of NaN decode to +-480 unless `nans` says that there are some: then, and only then, every code is looked at.
//
// Compiled per variant with: NAME, X_BF16, HEAD (a multiple of 32), WARPS, TILES, KV (0 codes and one scale each for keys
// and values, 1 codes and scales per token and head, 2 16 bit). Needs everything on 16-byte boundaries.
#include "attention.cuh"

#define STEP (16 * TILES)
#define KEY_WORDS (HEAD / (KV == 2 ? 8 : 16))     // a lane's part of a key
#define VALUE_WORDS (HEAD / (KV == 2 ? 16 : 32))  // and of a value
#define ELEMENT (KV == 2 ? 2 : 1)
#define MMA_BF16 (KV == 2 && X_BF16)
#define UNIT (KV == 2 ? 1.0f : 256.0f)  // what decoding leaves over
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

// Codes at bytes 1 and 3, and at bytes 0 and 2, as pairs of FP16 values times 2^-8: seven instructions for four codes.
struct Crossed {
    u32 odd, even;
};

DEVICE Crossed crossed(u32 codes) {
    return {(codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u), (codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u)};
}

// The top bit of every byte that is a NaN code.
DEVICE u32 nan_codes(u32 codes) { return ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u; }

// NaN in the halves of a pair of tokens whose codes at byte `place` are.
DEVICE u32 nan_pair(u32 first, u32 second, int place) {
    const u32 low = nan_codes(first) >> (8 * place + 7) & 1u, high = nan_codes(second) >> (8 * place + 7) & 1u;
    return low * 0x7FFFu | high * 0x7FFF0000u;
}

// One 16-token tile: scores of its tokens g and g + 8 for heads 2t and 2t + 1.
template <bool NANS>
DEVICE void score(float (&s)[4], const Words<KEY_WORDS> (&key)[2], const u32 (&q)[HEAD / 8]) {
    u32 poison[2] = {0, 0};
    if (NANS) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int w = 0; w < KEY_WORDS; ++w) poison[r] |= nan_codes(key[r].at[w]);
            poison[r] = poison[r] != 0 ? 0x7FFF7FFFu : 0;
        }
    }
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
        u32 a[4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#if KV == 2
            a[r] = key[r].at[2 * step], a[r + 2] = key[r].at[2 * step + 1];
#else
            const Crossed pairs = crossed(key[r].at[step]);
            a[r] = NANS && step == 0 ? pairs.odd | poison[r] : pairs.odd, a[r + 2] = pairs.even;
#endif
        }
        const u32 b[2] = {q[2 * step], q[2 * step + 1]};
        mma<MMA_BF16>(s, a, b);
    }
}

// sum[j] += the tile's values, rows 2j and 2j + 1 of the eighth of HEAD that g names, times the weights of its tokens.
template <bool NANS>
DEVICE void add_values(float (&sum)[HEAD / 16][4], const Words<VALUE_WORDS> (&value)[4], const u32 (&weight)[2]) {
#pragma unroll
    for (int w = 0; w < VALUE_WORDS; ++w) {
#pragma unroll
        for (int j = 0; j < (KV == 2 ? 1 : 2); ++j) {
            u32 a[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // tokens 2t and 2t + 1, then 2t + 8 and 2t + 9
                const u32 first = value[2 * half].at[w], second = value[2 * half + 1].at[w];
#if KV == 2
                a[2 * half] = permute(first, second, 0x5410u), a[2 * half + 1] = permute(first, second, 0x7632u);
#else
                const Crossed pairs = crossed(permute(first, second, j == 0 ? 0x5410u : 0x7632u));
                a[2 * half] = pairs.even, a[2 * half + 1] = pairs.odd;
                if (NANS) {
                    a[2 * half] |= nan_pair(first, second, 2 * j);
                    a[2 * half + 1] |= nan_pair(first, second, 2 * j + 1);
                }
#endif
            }
            mma<MMA_BF16>(sum[KV == 2 ? w : 2 * w + j], a, weight);
        }
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

// A lane's part of q for the head that its g names, in the order of the keys; zeros past the last head. Returns what
// undoes the power of two.
DEVICE float load_query(u32 (&query)[HEAD / 8], const u16* from, bool there) {
#pragma unroll
    for (int i = 0; i < HEAD / 32; ++i) {
        const uint4 v = there ? load_shared_by_all(from + 8 * i) : uint4{0, 0, 0, 0};
        query[4 * i] = v.x, query[4 * i + 1] = v.y, query[4 * i + 2] = v.z, query[4 * i + 3] = v.w;
    }
    float undo = 1.0f;
#if KV < 2
#if X_BF16
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD / 8; ++i) {
        const float low = fabsf(float_of_bits(query[i] << 16)), high = fabsf(float_of_bits(query[i] & 0xFFFF0000u));
        amax = fmaxf(amax, low < float_of_bits(0x7F800000u) ? low : 0.0f);
        amax = fmaxf(amax, high < float_of_bits(0x7F800000u) ? high : 0.0f);
    }
    amax = fmaxf(amax, exchange(amax, 1));
    amax = fmaxf(amax, exchange(amax, 2));
    const u32 exponent = bits_of_float(amax) >> 23, up = exponent < 15 ? 253 : 268 - exponent;
    const float factor = float_of_bits(up << 23);
    undo = float_of_bits((254 - up) << 23);
#pragma unroll
    for (int i = 0; i < HEAD / 8; ++i) {
        const float low = float_of_bits(query[i] << 16), high = float_of_bits(query[i] & 0xFFFF0000u);
        query[i] = fp16_of_float(low * factor) | u32(fp16_of_float(high * factor)) << 16;
    }
#endif
#pragma unroll
    for (int i = 0; i < HEAD / 16; ++i) {
        const u32 first = query[2 * i], second = query[2 * i + 1];
        query[2 * i] = permute(first, second, 0x7632u), query[2 * i + 1] = permute(first, second, 0x5410u);
    }
#endif
    return undo;
}

struct Cache {
    const u8 *keys, *values, *mask;   // of the row of the batch and the key head
    const float *k_scale, *v_scale;   // KV 1: of those, too
    int end;
};

// What a warp has found: weighted values, the largest score and the weights of heads 2t and 2t + 1, the unit of the values.
struct Found {
    float sum[HEAD / 16][4], highest[2], mass[2], unit;
};

template <bool NANS>
DEVICE void walk(Found& f, const Cache& cache, const u32 (&query)[HEAD / 8], const float (&unit)[2], int begin) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int base = begin; base < cache.end; base += WARPS * STEP) {
        Words<KEY_WORDS> key[TILES][2];
        Words<VALUE_WORDS> value[TILES][4];
        float k_unit[TILES][2], v_unit[TILES][2];
        bool seen[TILES][2];
        const int last = cache.end - 1;  // tokens past the end read it, and weigh nothing
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = base + 16 * i + 8 * r + g, place = token < last ? token : last;
                seen[i][r] = token <= last && (cache.mask == nullptr || cache.mask[place] != 0);
                key[i][r] = load<KEY_WORDS>(cache.keys + (i64(place) * HEAD + t * (HEAD / 4)) * ELEMENT);
                k_unit[i][r] = KV == 1 ? cache.k_scale[place] : 1.0f;
                v_unit[i][r] = KV == 1 ? cache.v_scale[place] : 1.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int token = base + 16 * i + 8 * (r / 2) + 2 * t + r % 2, place = token < last ? token : last;
                value[i][r] = load<VALUE_WORDS>(cache.values + (i64(place) * HEAD + g * (HEAD / 8)) * ELEMENT);
                if (KV == 2 || NANS) {  // where zero times what lies there could be NaN
                    const bool read = token <= last && (cache.mask == nullptr || cache.mask[place] != 0);
#pragma unroll
                    for (int w = 0; w < VALUE_WORDS; ++w) value[i][r].at[w] = read ? value[i][r].at[w] : 0;
                }
            }
        }
        float s[TILES][4], highest[2] = {f.highest[0], f.highest[1]}, largest_unit = f.unit;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int c = 0; c < 4; ++c) s[i][c] = 0.0f;
            score<NANS>(s[i], key[i], query);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (KV == 1) largest_unit = fmaxf(largest_unit, seen[i][r] ? v_unit[i][r] : 0.0f);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    s[i][2 * r + h] = seen[i][r] ? s[i][2 * r + h] * (unit[h] * k_unit[i][r]) : MINUS_INFINITY;
                    highest[h] = fmaxf(highest[h], s[i][2 * r + h]);
                }
            }
        }
        float kept_unit = 1.0f, by = 1.0f;
        if (KV == 1) {
            largest_unit = over_tokens(largest_unit, true);
            by = largest_unit > 0.0f ? 1.0f / largest_unit : 0.0f;
            kept_unit = f.unit * by;
            f.unit = largest_unit;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            highest[h] = over_tokens(highest[h], true);
            const float from = highest[h] == MINUS_INFINITY ? 0.0f : highest[h];
            const float kept = exp2_approximately(f.highest[h] - from);
            f.highest[h] = highest[h];
            f.mass[h] *= kept;
#pragma unroll
            for (int j = 0; j < HEAD / 16; ++j) f.sum[j][h] *= kept * kept_unit, f.sum[j][h + 2] *= kept * kept_unit;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float weight = exp2_approximately(s[i][2 * r + h] - from);
                    f.mass[h] += weight;
                    s[i][2 * r + h] = KV == 1 ? weight * (v_unit[i][r] * by) : weight;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            u32 weight[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float low = s[i][2 * r], high = s[i][2 * r + 1];
                weight[r] = transpose_8x8(MMA_BF16 ? bf16_of_float(low) | u32(bf16_of_float(high)) << 16
                                                   : fp16_of_float(low) | u32(fp16_of_float(high)) << 16);
            }
            add_values<NANS>(f.sum, value[i], weight);
        }
    }
}

KERNEL(32 * WARPS, 1)
NAME(const u16* q, const u8* keys, const u8* values, const float* k_scale, const float* v_scale, const int* nans,
     const u8* mask, const int* length, float* partial, int kv_heads, int group, i64 batch_stride, i64 head_stride,
     i64 mask_stride, int splits, int added, int window, float scale) {
    SHARED float sums[WARPS][8][PITCH];
    SHARED float largest[WARPS][8], total[WARPS][8], value_unit[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int eights = (group + 7) / 8;
    const int head_of_group = int(blockIdx.y) % eights * 8, kv = int(blockIdx.y) / eights;
    const int batch = kv / kv_heads, heads = group - head_of_group < 8 ? group - head_of_group : 8;
    const i64 origin = batch * batch_stride + kv % kv_heads * head_stride, query_row = i64(kv) * group + head_of_group;
    wait_for_previous_kernel();
    const Splits range = splits_of(length, added, window, splits, WARPS * STEP);
    if (int(blockIdx.x) >= range.count) return;
    const int begin = range.first + int(blockIdx.x) * range.size;

    u32 query[HEAD / 8];
    const float undo = load_query(query, q + (query_row + g) * HEAD + t * (HEAD / 4), g < heads);
    const float all = scale * LOG2_E * UNIT * (KV == 0 ? k_scale[0] : 1.0f);
    const float unit[2] = {all * broadcast(undo, 8 * t), all * broadcast(undo, 8 * t + 4)};
    const Cache cache = {keys + origin * ELEMENT, values + origin * ELEMENT,
                         mask == nullptr ? nullptr : mask + batch * mask_stride,
                         KV == 1 ? k_scale + origin / HEAD : nullptr, KV == 1 ? v_scale + origin / HEAD : nullptr,
                         begin + range.size < range.last ? begin + range.size : range.last};
    Found f = {{}, {MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}, KV == 1 ? 0.0f : 1.0f};
    if (KV < 2 && nans[0] != 0)
        walk<true>(f, cache, query, unit, begin + warp * STEP);
    else
        walk<false>(f, cache, query, unit, begin + warp * STEP);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        f.mass[h] = over_tokens(f.mass[h], false);
        if (g == 0) largest[warp][2 * t + h] = f.highest[h], total[warp][2 * t + h] = f.mass[h];
#pragma unroll
        for (int j = 0; j < HEAD / 16; ++j) {
            float* to = &sums[warp][2 * t + h][g * (HEAD / 8) + 2 * j];
            to[0] = f.sum[j][h], to[1] = f.sum[j][h + 2];
        }
    }
    if (lane == 0) value_unit[warp] = f.unit * UNIT * (KV == 0 ? v_scale[0] : 1.0f);
    __syncthreads();
    for (int at = threadIdx.x; at < heads * HEAD; at += 32 * WARPS) {
        const int head = at / HEAD, d = at % HEAD;
        float top = MINUS_INFINITY, mass = 0.0f, result = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, largest[w][head]);
        const float from = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float share = exp2_approximately(largest[w][head] - from);
            mass += total[w][head] * share;
            result += sums[w][head][d] * (share * value_unit[w]);
        }
        float* to = partial + ((query_row + head) * splits + blockIdx.x) * (HEAD + 2);
        to[d] = result;
        if (d == 0) to[HEAD] = top, to[HEAD + 1] = mass;
    }
}
