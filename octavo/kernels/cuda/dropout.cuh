// Which values of a matrix dropout takes, from a seed and where they are, so that the way back finds the same ones again:
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, as easy as 1, 2, 3; SC 2011).
#pragma once
#include "device.cuh"

struct Kept {
    u32 word[4];  // 16 bits a value, all ones where it is kept
};

DEVICE u32 upper_half(u32 a, u32 b) { return u32((unsigned long long)a * b >> 32); }

// Of columns 8 * eighth to 8 * eighth + 7 of a row: those whose 16 random bits are `dropped` or above.
DEVICE Kept kept_values(i64 row, u32 eighth, i64 seed, u32 dropped) {
    u32 a = eighth, b = u32(row), c = u32(row >> 32), d = 0, key = u32(seed), other_key = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 above = upper_half(0xD2511F53u, a), below = a * 0xD2511F53u;
        const u32 other_above = upper_half(0xCD9E8D57u, c), other_below = c * 0xCD9E8D57u;
        a = other_above ^ b ^ key, b = other_below, c = above ^ d ^ other_key, d = below;
        key += 0x9E3779B9u, other_key += 0xBB67AE85u;
    }
    Kept kept = {{a, b, c, d}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 bits = kept.word[i];
        kept.word[i] = ((bits & 0xFFFFu) >= dropped ? 0xFFFFu : 0u) | (bits >> 16 >= dropped ? 0xFFFF0000u : 0u);
    }
    return kept;
}
