// Low-rank values of a token -> columns K to K + room of its codes: R leading codes, the same again, R trailing ones, zeros.
//
// FORWARD: low [M, low_pitch] 16 bit holds, in columns j and R + j, the sums of the token's codes and those of A's two terms. Their
// sum times `range` is what is written; times the token's scale and unit[j], 16 bit, it is kept [M, R].
// Backward: low [M, R], times unit[j] and over the token's scale.
// A token whose values are beyond 448 takes a larger scale: its codes shrink by a power of two. GROUPED: scales are per
// group of 128 columns, those of a group `group_stride` apart; the sums are of decoded values, and what is written takes
// a scale of its own. A token with NaN or Inf among its values is NaN as a whole, by its scales. One warp a token.
// Compiled with: NAME, X_BF16, FORWARD, GROUPED. Needs K, room and pitch % 16 == 0, GROUPED K and room % 128 == 0.
#include "terms.cuh"

DEVICE float float_of(u16 bits) { return X_BF16 ? float_of_bits(u32(bits) << 16) : float_of_fp16(bits); }
DEVICE u16 rounded(float value) { return X_BF16 ? bf16_of_float(value) : fp16_of_float(value); }

KERNEL(256, 1)
NAME(const u16* low, const float* unit, u8* codes, float* scale, u16* kept, float range, i64 M, int K, int R, int room,
     int low_pitch, i64 pitch, i64 group_stride) {
    wait_for_previous_kernel();
    const i64 token = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (token >= M) return;
    const float own = GROUPED ? 1.0f : scale[token];
    const u16* from = low + token * low_pitch;
    u8* row = codes + token * pitch;
    const auto sum = [=](int j) { return FORWARD ? float_of(from[j]) + float_of(from[R + j]) : float_of(from[j]); };
    const auto value = [=](int j) { return FORWARD ? (GROUPED ? sum(j) : sum(j) * range) : sum(j) * unit[j] / own; };
    float largest = 0.0f, wrong = 0.0f;
    for (int j = lane; j < R; j += 32) {
        largest = fmaxf(largest, fabsf(value(j)));
        if (!(fabsf(value(j)) < INFINITE)) wrong = 1.0f;
        if (FORWARD) kept[token * R + j] = rounded(sum(j) * (own * unit[j]));
    }
    largest = max_of_warp(largest);
    const bool valid = max_of_warp(wrong) == 0.0f;
    const float nan = float_of_bits(0x7FC00000u);
    const float shrunk = GROUPED ? scale_of_largest(largest) : shrinkage(largest);
    if (!GROUPED && shrunk != 1.0f) shrink_codes(row, K, shrunk);
    for (int j = lane; j < R; j += 32) {
        const Terms t = terms_of(value(j) / shrunk);
        row[K + j] = u8(t.leading);
        row[K + R + j] = u8(t.leading);
        row[K + 2 * R + j] = u8(t.trailing);
    }
    for (int j = 3 * R + lane; j < room; j += 32) row[K + j] = 0;
#if GROUPED
    for (int group = (valid ? K / 128 : 0) + lane; group < (K + room) / 128; group += 32)
        scale[group * group_stride + token] = valid ? shrunk : nan;
#else
    if (lane == 0) scale[token] = valid ? own * shrunk : nan;
#endif
}
