// Codes of W [N, K] and the B [N, r] of its adapter, float32 -> codes [N, K + room] and scales: W with more columns.
//
// b = B * unit / (range * the row's scale) goes to columns begin + j as its leading, R columns further as its trailing and
// 2 R further again as its leading code; the other columns are zeros. A row whose b are beyond 448 takes a larger scale:
// its codes shrink by a power of two. A row of zeros, by its codes or by a scale below 2**-100, takes the scale that suits
// b. One warp a row.
// Compiled with: NAME. Needs K and room % 16 == 0.
#include "terms.cuh"

KERNEL(256, 1)
NAME(const u8* from, const float* scale, const float* b, const float* unit, u8* to, float* to_scale, float range, int N,
     int K, int r, int begin, int R, int room) {
    const int n = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const uint4* source = reinterpret_cast<const uint4*>(from + i64(n) * K);
    u8* row = to + i64(n) * (K + room);
    uint4* target = reinterpret_cast<uint4*>(row);
    const bool nothing = fabsf(scale[n]) < float_of_bits(0x0D800000u);
    const float own = nothing ? 1.0f : scale[n];
    u32 seen = 0;
#pragma unroll 4
    for (int i = lane; i < K / 16; i += 32) {
        const uint4 codes = nothing ? uint4{0, 0, 0, 0} : load_once(source + i);
        seen |= (codes.x | codes.y | codes.z | codes.w) & 0x7F7F7F7Fu;
        target[i] = codes;
    }
    float largest = 0.0f;
    for (int j = lane; j < r; j += 32) largest = fmaxf(largest, fabsf(b[i64(n) * r + j] * unit[begin + j] / (range * own)));
    largest = max_of_warp(largest);
    float shrunk = shrinkage(largest);
    if (max_of_warp(seen ? 1.0f : 0.0f) == 0.0f) {
        if (largest > 0.0f && largest < INFINITE) shrunk = power_of_two_above(largest / 448.0f);
    } else if (shrunk != 1.0f) {
        sync_warp();
        shrink_codes(row, K, shrunk);
    }
    uint4* rest = reinterpret_cast<uint4*>(row + K);
    for (int i = lane; i < room / 16; i += 32) rest[i] = uint4{0, 0, 0, 0};
    sync_warp();
    for (int j = lane; j < r; j += 32) {
        const Terms t = terms_of(b[i64(n) * r + j] * unit[begin + j] / (range * (own * shrunk)));
        row[K + begin + j] = u8(t.leading);
        row[K + R + begin + j] = u8(t.trailing);
        row[K + 2 * R + begin + j] = u8(t.leading);
    }
    if (lane == 0) to_scale[n] = own * shrunk;
}
