// The second phase of attention.cu: the splits of one query head, in order, into its 16-bit result.
//
// partial float32 [rows, splits, HEAD + 2]: sums of weighted values, the largest score (base 2), the sum of weights.
// A head that saw no token gets zeros. Compiled per variant with: NAME, X_BF16, HEAD, BLOCK (tokens that a block of the
// first phase takes at once), MOST (of splits).
#include "attention.cuh"

KERNEL(HEAD, 1)
NAME(const float* partial, const int* length, u16* out, int splits, int added, int window) {
    SHARED float highest[MOST], mass[MOST];
    wait_for_previous_kernel();
    const Splits range = splits_of(length, added, window, splits, BLOCK);
    const i64 row = blockIdx.x;
    const float* from = partial + row * splits * (HEAD + 2);
    const int d = threadIdx.x;
    for (int s = d; s < range.count; s += HEAD) {
        highest[s] = from[s * (HEAD + 2) + HEAD];
        mass[s] = from[s * (HEAD + 2) + HEAD + 1];
    }
    __syncthreads();
    float top = float_of_bits(0xFF800000u), total = 0.0f, sum = 0.0f;
    for (int s = 0; s < range.count; ++s) top = fmaxf(top, highest[s]);
    if (top == float_of_bits(0xFF800000u)) top = 0.0f;
#pragma unroll 8
    for (int s = 0; s < range.count; ++s) {
        const float share = exp2_approximately(highest[s] - top);
        total += mass[s] * share;
        sum += from[s * (HEAD + 2) + d] * share;
    }
    const float result = total == 0.0f ? 0.0f : sum / total;
    out[row * HEAD + d] = X_BF16 ? bf16_of_float(result) : fp16_of_float(result);
}
