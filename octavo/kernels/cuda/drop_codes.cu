// FP8 codes [M, K], rows `pitch` apart -> the same [M, K] without a pitch, zero where dropout takes a value. A thread
// takes 16. Compiled with: NAME. Needs K and pitch % 16 == 0, codes on 16 bytes.
#include "dropout.cuh"

KERNEL(256, 1)
NAME(const u8* codes, u8* to, i64 seed, int dropped, i64 M, int K, i64 pitch) {
    wait_for_previous_kernel();
    const int pieces = K / 16;
    const i64 at = i64(blockIdx.x) * 256 + threadIdx.x, row = at / pieces;
    const u32 piece = u32(at % pieces);
    if (row >= M) return;
    const uint4 v = *reinterpret_cast<const uint4*>(codes + row * pitch + i64(piece) * 16);
    u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Kept kept = kept_values(row, 2 * piece + half, seed, u32(dropped));
        word[2 * half] &= permute(kept.word[0], kept.word[1], 0x6420);
        word[2 * half + 1] &= permute(kept.word[2], kept.word[3], 0x6420);
    }
    *reinterpret_cast<uint4*>(to + row * K + i64(piece) * 16) = uint4{word[0], word[1], word[2], word[3]};
}
