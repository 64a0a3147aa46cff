// New keys and values into a cache, at a position read from device memory so that a captured graph finds the next one;
// with ROTARY also the rotary embedding of queries [B, tokens, q_heads, HEAD] and keys, before which Qwen3 normalizes
// each head.
//
// 16-bit keys, values and, with ROTARY, queries; cache [B, kv_heads, capacity, HEAD] of E4M3 codes or 16-bit values.
// Codes are bit for bit formats.reference: RNE(x / scale) with scale given (KV 0), or amax / 448 of the head's finite
// values (KV 1), stored at [B, kv_heads, capacity]; KV 2 copies. `nans` [1] becomes 1 where a NaN is written. Rotary embedding and norm round where Transformers'
// own round, to 16 bit after every operation. A warp takes one head of one token; a lane the values at lane + 32 i of
// both halves, so that the pairs which are rotated together meet in one lane.
//
// Compiled per variant with: NAME, X_BF16, THREADS, HEAD (even), KV, ROTARY, NORM.
#include "rows.cuh"

#define ROUNDS ((HEAD / 2 + 31) / 32)

struct Head {
    float low[ROUNDS], high[ROUNDS];
};

DEVICE u16 to_16_bit(float value) { return u16(rounded(value, 0.0f)); }
DEVICE float again(float value) { return float_of(to_16_bit(value)); }
DEVICE bool inside(int lane, int round) { return lane + 32 * round < HEAD / 2; }

DEVICE Head loaded(const u16* from, int lane) {
    Head x;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int d = lane + 32 * i;
        x.low[i] = inside(lane, i) ? float_of(from[d]) : 0.0f;
        x.high[i] = inside(lane, i) ? float_of(from[d + HEAD / 2]) : 0.0f;
    }
    return x;
}

DEVICE void store(u16* to, const Head& x, int lane) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (!inside(lane, i)) continue;
        to[lane + 32 * i] = to_16_bit(x.low[i]);
        to[lane + 32 * i + HEAD / 2] = to_16_bit(x.high[i]);
    }
}

// x * rsqrt(mean(x^2) + epsilon) * weight
DEVICE void normalize(Head& x, const u16* weight, float epsilon, int lane) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) squares += x.low[i] * x.low[i] + x.high[i] * x.high[i];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) squares += exchange(squares, mask);
    const float rstd = 1.0f / sqrtf(squares / float(HEAD) + epsilon);
    const Head w = loaded(weight, lane);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        x.low[i] = again(again(x.low[i] * rstd) * w.low[i]);
        x.high[i] = again(again(x.high[i] * rstd) * w.high[i]);
    }
}

// cosine, sine: of the token's position, 16 bit [HEAD / 2]
DEVICE void rotate(Head& x, const u16* cosine, const u16* sine, int lane) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int d = inside(lane, i) ? lane + 32 * i : 0;
        const float c = float_of(cosine[d]), s = float_of(sine[d]), low = x.low[i], high = x.high[i];
        x.low[i] = again(again(rounded_product(low, c)) - again(rounded_product(high, s)));
        x.high[i] = again(again(rounded_product(high, c)) + again(rounded_product(low, s)));
    }
}

DEVICE void store_codes(u8* to, float* scale, int* nans, const Head& x, int lane) {
#if KV == 1
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        amax = larger(amax, fabsf(x.low[i]) < INFINITE ? x.low[i] : 0.0f);
        amax = larger(amax, fabsf(x.high[i]) < INFINITE ? x.high[i] : 0.0f);
    }
    const float unit = scale_of(amax_of_lanes(amax, 32)).value;
    if (lane == 0) *scale = unit;
#else
    const float unit = scale[0];
#endif
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (!inside(lane, i)) continue;
        if (x.low[i] != x.low[i] || x.high[i] != x.high[i]) *nans = 1;  // whoever writes it writes the same
        to[lane + 32 * i] = u8(e4m3_of_float(x.low[i] / unit));
        to[lane + 32 * i + HEAD / 2] = u8(e4m3_of_float(x.high[i] / unit));
    }
}

// A block's warps take heads in the order queries (with ROTARY), keys, values; blockIdx.x is the token of the batch.
// Strides in values; `padding` [B] tokens before a row's first, or null.
KERNEL(THREADS, 1)
NAME(const u16* q, const u16* k, const u16* v, u16* q_out, u8* keys, u8* values, float* k_scale, float* v_scale,
     int* nans, const u16* cosine, const u16* sine, const u16* q_norm, const u16* k_norm, const int* length, const int* padding,
     int added, int tokens, int q_heads, int kv_heads, float epsilon, i64 q_batch, i64 q_token, i64 k_batch, i64 k_head, i64 k_token,
     i64 v_batch, i64 v_head, i64 v_token, i64 batch_stride, i64 head_stride) {
    const int lane = threadIdx.x % 32, unit = int(blockIdx.y) * (THREADS / 32) + threadIdx.x / 32;
    const int batch = int(blockIdx.x) / tokens, token = int(blockIdx.x) % tokens;
    const int rotated = ROTARY ? q_heads : 0;
    wait_for_previous_kernel();
    if (unit >= rotated + 2 * kv_heads) return;
    const int place = (length != nullptr ? *length : 0) + added + token;
    const int kind = unit < rotated ? 0 : unit < rotated + kv_heads ? 1 : 2;
    const int head = kind == 0 ? unit : (unit - rotated) % kv_heads;
    const u16* from = kind == 0 ? q + batch * q_batch + token * q_token + i64(head) * HEAD
                    : kind == 1 ? k + batch * k_batch + head * k_head + token * k_token
                                : v + batch * v_batch + head * v_head + token * v_token;
    Head x = loaded(from, lane);
#if ROTARY
    if (kind < 2) {
        if (NORM) normalize(x, kind == 0 ? q_norm : k_norm, epsilon, lane);
        const int shift = padding != nullptr ? padding[batch] : 0;
        const i64 position = place > shift ? place - shift : 0;
        rotate(x, cosine + position * (HEAD / 2), sine + position * (HEAD / 2), lane);
    }
#endif
    if (kind == 0) {
        store(q_out + (i64(blockIdx.x) * q_heads + head) * HEAD, x, lane);
        return;
    }
    const i64 at = batch * batch_stride + head * head_stride + i64(place) * HEAD;
    u8* to = kind == 1 ? keys : values;
#if KV == 2
    store(reinterpret_cast<u16*>(to) + at, x, lane);
#else
    float* scale = kind == 1 ? k_scale : v_scale;
    store_codes(to + at, scale + (KV == 1 ? at / HEAD : 0), nans, x, lane);
#endif
}
