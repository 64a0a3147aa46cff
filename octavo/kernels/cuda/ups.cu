// Codes of W [N, K] and the B [N, r] of its adapter, float32 -> codes [N, K + room] and scales: W with more columns.
//
// b = B * unit / (range * the row's scale) goes to columns begin + j as its leading, R columns further as its trailing and
// 2 R further again as its leading code; the other columns are zeros. A row whose b are beyond 448 takes a larger scale:
// its codes shrink by a power of two. A row of zeros, by its codes or by a scale below 2**-100, takes the scale that suits
// b. One warp a row.
// BLOCKS: scale [N / 128, K / 128], to_scale [N / 128, (K + room) / 128]; b = B * unit takes the scale of its 128 rows' largest.
// Compiled with: NAME, BLOCKS. Needs K and room % 16 == 0, BLOCKS N, K and room % 128 == 0.
#include "terms.cuh"

// What belongs to an adapter's column j of a row, leading, trailing and leading again.
DEVICE void store_terms(u8* columns, int R, float value) {
    const Terms t = terms_of(value);
    columns[0] = u8(t.leading), columns[R] = u8(t.trailing), columns[2 * R] = u8(t.leading);
}

KERNEL(256, 1)
NAME(const u8* from, const float* scale, const float* b, const float* unit, u8* to, float* to_scale, float range, int N,
     int K, int r, int begin, int R, int room) {
    wait_for_previous_kernel();
    const int n = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
#if BLOCKS
    SHARED float largest_of[8];
    const i64 band = blockIdx.x / 16;
    float largest = 0.0f;
    for (int i = threadIdx.x; i < 128 * r; i += 256) largest = fmaxf(largest, fabsf(b[band * 128 * r + i] * unit[begin + i % r]));
    largest = max_of_warp(largest);
    if (lane == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) largest = fmaxf(largest, largest_of[warp]);
    const float own = scale_of_largest(largest);
#endif
    if (n >= N) return;
    const uint4* source = reinterpret_cast<const uint4*>(from + i64(n) * K);
    u8* row = to + i64(n) * (K + room);
    uint4* target = reinterpret_cast<uint4*>(row);
    const bool nothing = !BLOCKS && fabsf(scale[n]) < float_of_bits(0x0D800000u);
    u32 seen = 0;
#pragma unroll 4
    for (int i = lane; i < K / 16; i += 32) {
        const uint4 codes = nothing ? uint4{0, 0, 0, 0} : load_once(source + i);
        seen |= (codes.x | codes.y | codes.z | codes.w) & 0x7F7F7F7Fu;
        target[i] = codes;
    }
#if BLOCKS
    const int blocks = K / 128, all = blocks + room / 128;
    if (n % 128 == 0)
        for (int i = lane; i < all; i += 32) to_scale[band * all + i] = i < blocks ? scale[band * blocks + i] : own;
    const auto value = [=](int j) { return b[i64(n) * r + j] * unit[begin + j] / own; };
#else
    float own = nothing ? 1.0f : scale[n];
    const auto value = [&](int j) { return b[i64(n) * r + j] * unit[begin + j] / (range * own); };
    float largest = 0.0f;
    for (int j = lane; j < r; j += 32) largest = fmaxf(largest, fabsf(value(j)));
    largest = max_of_warp(largest);
    float shrunk = shrinkage(largest);
    if (max_of_warp(seen ? 1.0f : 0.0f) == 0.0f) {
        if (largest > 0.0f && largest < INFINITE) shrunk = power_of_two_above(largest / 448.0f);
    } else if (shrunk != 1.0f) {
        sync_warp();
        shrink_codes(row, K, shrunk);
    }
    own *= shrunk;
    if (lane == 0) to_scale[n] = own;
#endif
    uint4* rest = reinterpret_cast<uint4*>(row + K);
    for (int i = lane; i < room / 16; i += 32) rest[i] = uint4{0, 0, 0, 0};
    sync_warp();
    for (int j = lane; j < r; j += 32) store_terms(row + K + begin + j, R, value(j));
}
