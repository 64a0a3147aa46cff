// Bytes of up to four matrices [N_i, K] -> [K, sum of N_i], rows `pitch` apart: W's codes as the FP8 tensor cores want
// them for dX. Matrix i ends at row end_i of all; an absent one has the end of the one before. A tile of 128 x 128 a block.
//
// Loads and stores are 16 bytes. In between, a thread gathers 16 rows of one 32-bit column from shared memory and turns
// four 4 x 4 blocks of bytes with byte permutes. Rows of shared memory are XOR-swizzled in units of 16 bytes by their
// group of 16, so that neither side has bank conflicts while neighbouring lanes store neighbouring bytes.
// Needs N_i, K and pitch % 16 == 0.
#include "device.cuh"

#define TILE 128

DEVICE int swizzled(int row, int word) { return row * (TILE / 4) + (word ^ (row / 16 * 4)); }

KERNEL(256, 1)
NAME(const u8* first, const u8* second, const u8* third, const u8* fourth, u8* to, int end0, int end1, int end2,
     int end3, int K, i64 pitch) {
    wait_for_previous_kernel();
    SHARED u32 tile[TILE * TILE / 4];
    const int which = blockIdx.z, begin = which == 0 ? 0 : which == 1 ? end0 : which == 2 ? end1 : end2;
    const int N = (which == 0 ? end0 : which == 1 ? end1 : which == 2 ? end2 : end3) - begin;
    const u8* from = which == 0 ? first : which == 1 ? second : which == 2 ? third : fourth;
    const int row0 = blockIdx.x * TILE, column0 = blockIdx.y * TILE;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x / 8 + 32 * i, word = threadIdx.x % 8 * 4;
        if (row0 + row >= N || column0 + word * 4 >= K) continue;
        *reinterpret_cast<uint4*>(&tile[swizzled(row, word)]) =
            load_once(from + i64(row0 + row) * K + column0 + word * 4);
    }
    __syncthreads();
    const int rows = threadIdx.x % 8 * 16, word = threadIdx.x / 8;
    if (row0 + rows >= N || column0 + word * 4 >= K) return;
    u32 turned[4][4];  // [column in the word][group of four rows]
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = tile[swizzled(rows + 4 * group + i, word)];
        const u32 even01 = permute(w[0], w[1], 0x6240), odd01 = permute(w[0], w[1], 0x7351);
        const u32 even23 = permute(w[2], w[3], 0x6240), odd23 = permute(w[2], w[3], 0x7351);
        turned[0][group] = permute(even01, even23, 0x5410);
        turned[1][group] = permute(odd01, odd23, 0x5410);
        turned[2][group] = permute(even01, even23, 0x7632);
        turned[3][group] = permute(odd01, odd23, 0x7632);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        u8* at = to + (column0 + word * 4 + c) * pitch + begin + row0 + rows;
        *reinterpret_cast<uint4*>(at) = uint4{turned[c][0], turned[c][1], turned[c][2], turned[c][3]};
    }
}
