// y [M, K] += added [M, K], both 16 bit and contiguous, where dropout kept a value of row first + m. A thread takes 8.
// Compiled with: NAME, X_BF16. Needs K % 8 == 0, both on 16 bytes.
#include "dropout.cuh"

DEVICE float float_of(u32 bits) { return X_BF16 ? float_of_bits(bits << 16) : float_of_fp16(u16(bits)); }
DEVICE u32 sum_of(u32 y, u32 added, u32 kept) {
    const float low = float_of(y & 0xFFFFu) + float_of(added & 0xFFFFu), high = float_of(y >> 16) + float_of(added >> 16);
    return ((X_BF16 ? bf16x2_of_floats(low, high) : fp16x2_of_floats(low, high)) & kept) | (y & ~kept);
}

KERNEL(256, 1)
NAME(u16* y, const u16* added, i64 seed, int dropped, i64 M, int K, i64 first) {
    wait_for_previous_kernel();
    const int pieces = K / 8;
    const i64 at = i64(blockIdx.x) * 256 + threadIdx.x, row = at / pieces;
    if (row >= M) return;
    const Kept kept = kept_values(first + row, u32(at % pieces), seed, u32(dropped));
    const uint4 a = reinterpret_cast<const uint4*>(y)[at], b = reinterpret_cast<const uint4*>(added)[at];
    reinterpret_cast<uint4*>(y)[at] = uint4{sum_of(a.x, b.x, kept.word[0]), sum_of(a.y, b.y, kept.word[1]),
                                            sum_of(a.z, b.z, kept.word[2]), sum_of(a.w, b.w, kept.word[3])};
}
