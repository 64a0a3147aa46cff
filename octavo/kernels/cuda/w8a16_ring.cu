// y = x W^T for few tokens: x 16 bit [M, K], W FP8 codes [N, K] as files hold them, y 16 bit [M, N].
//
// Decoding is bound by reading W once. The grid is as large as the GPU: a block takes every gridDim.x-th tile of ROWS
// rows, and its WARPS_K warps deal the chunks of 128 of K among themselves. A warp copies its chunks DEPTH - 1 ahead into
// a ring in shared memory that only it reads, across the ends of tiles: the memory never waits for a sum. Partial sums
// meet in shared memory in a fixed order: no atomics, no locks, the same bits every time, whatever the grid.
//
// STAGED: x lies in shared memory as FP16, a token times a power of two that brings its largest value below 2**15, which
// the sum is divided by. For BF16 that is exact for values down to 2**-32 of the largest, and off by 2**-40 of it at most
// below; it makes W's codes FP16 operands, which cost less to decode than BF16 ones. Otherwise x comes from L1 as it is.
// Up to 8 tokens cost what one costs.
//
// Compiled per variant with: NAME, X_BF16, E5M2, SCALES (0 tensor, 1 row, 2 block 128 x 128), TILES_N, TILES_M,
// WARPS_N, WARPS_K, DEPTH, STAGED. Needs K % 16 == 0 and rows of x on 16-byte boundaries; dynamic shared memory as
// kernels/tiling.py says.
#define MMA_BF16 (X_BF16 && !STAGED)
#define ALTERNATE_X (X_BF16 && STAGED)  // its values can be put in any order
#include "w8a16.cuh"

#define THREADS (32 * WARPS_N * WARPS_K)
#define ROWS (16 * TILES_N * WARPS_N)
#define TOKENS (8 * TILES_M)
// Lanes of a warp write rows g and tokens 2t: a stride of 4 past a multiple of 16 keeps them in different banks.
#define PITCH (ROWS + 4)
#define SLOT (TILES_N * 4 * 32 * 16)
static_assert(THREADS % ROWS == 0, "a thread stores sums of one row");

// Begins to copy x to shared memory, rows of `pitch` values, zeros past K: one group of copies.
DEVICE void copy_tokens(u16* staged, const u16* x, int M, int K, int width, int pitch, i64 x_stride) {
    for (int token = 0; token < M; ++token) {
        const u16* row = x + token * x_stride;
#pragma unroll 1  // few registers
        for (int k = threadIdx.x * 8; k < width; k += THREADS * 8)
            copy_later(staged + token * pitch + k, k < K ? row + k : row, k < K);
    }
    end_of_copies();
}

// BF16 to FP16 by a power of two that brings the largest value of a token below 2**15. The largest exponent, 0 of values
// that are not finite.
DEVICE u32 larger_exponent(u32 largest, const Words& w) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 exponent = w.at[i / 2] >> (i % 2 * 16 + 7) & 0xFFu;
        largest = exponent != 255 && exponent > largest ? exponent : largest;
    }
    return largest;
}
DEVICE int power_to_fp16(u32 largest) { return largest < 15 ? 126 : 141 - int(largest); }
DEVICE float power_of_two(int exponent) { return float_of_bits(u32(exponent + 127) << 23); }

// BF16 to FP16 in place, each thread what it copied, in the order of decode(). factor[token] undoes what a token was
// multiplied with.
DEVICE void convert_tokens(u16* staged, float* factor, u32 (*exponents)[THREADS / 32], int M, int width, int pitch) {
    for (int token = 0; token < M; ++token) {
        u32 largest = 0;
#pragma unroll 1  // few registers
        for (int k = threadIdx.x * 8; k < width; k += THREADS * 8) {
            largest = larger_exponent(largest, words(shared_vector(staged + token * pitch + k)));
        }
        largest = largest_of_warp(largest);
        if (threadIdx.x % 32 == 0) exponents[token][threadIdx.x / 32] = largest;
    }
    __syncthreads();
    for (int token = 0; token < M; ++token) {
        const int lane = threadIdx.x % 32;
        const int up = power_to_fp16(largest_of_warp(lane < THREADS / 32 ? exponents[token][lane] : 0));
        const float multiplier = power_of_two(up);
        if (threadIdx.x == 0) factor[token] = power_of_two(-up);
#pragma unroll 1  // few registers
        for (int k = threadIdx.x * 8; k < width; k += THREADS * 8) {
            uint4* place = reinterpret_cast<uint4*>(staged + token * pitch + k);
            Words w = words(*place);
            float value[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[2 * i] = float_of_bits(w.at[i] << 16) * multiplier;
                value[2 * i + 1] = float_of_bits(w.at[i] & 0xFFFF0000u) * multiplier;
            }
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                w.at[i / 2] = fp16x2_of_floats(value[i], value[i + (ALTERNATE ? 2 : 1)]);
                w.at[i / 2 + 1] = fp16x2_of_floats(value[i + (ALTERNATE ? 1 : 2)], value[i + 3]);
            }
            *place = vector(w);
        }
    }
}

// The 16-byte pieces of a row of 128 in shared memory, so that what a warp reads at once lies in different banks.
DEVICE u8* piece_of(u8* slot, int row, int piece) { return slot + row * CHUNK + ((piece ^ (row % 2 * 4)) << 4); }

// A warp's way through the codes: its chunks of a tile after each other, whole lines of 128 bytes, four rows at once.
struct Source {
    const u8* at;  // of this lane, in the next chunk
    int tile, chunk;
    int N, K, row_in_tile, first_chunk;  // the row of this lane
};

DEVICE Source source_of(const u8* codes, int N, int K, int warp_row, int first_chunk, int lane) {
    const int row = warp_row + lane / 8;
    return {codes + (i64(blockIdx.x) * ROWS + row) * K + first_chunk * CHUNK + lane % 8 * 16,
            int(blockIdx.x), first_chunk, N, K, row, first_chunk};
}

DEVICE void copy_chunk(u8* slot, Source& from, int lane) {
    const int k = from.chunk * CHUNK + lane % 8 * 16, rows = from.N - from.tile * ROWS - from.row_in_tile;
    if (from.first_chunk * CHUNK < from.K && from.tile * ROWS < from.N) {
        u8* to = piece_of(slot, lane / 8, lane % 8);
#pragma unroll
        for (int i = 0; i < 4 * TILES_N; ++i)  // zeros past the end
            copy_later(to + i * 4 * CHUNK, from.at + i * i64(4) * from.K, k < from.K && 4 * i < rows);
        from.chunk += WARPS_K, from.at += WARPS_K * CHUNK;
        if (from.chunk * CHUNK >= from.K) {
            from.at += i64(gridDim.x) * ROWS * from.K - (from.chunk - from.first_chunk) * CHUNK;
            from.chunk = from.first_chunk, from.tile += gridDim.x;
        }
    }
    end_of_copies();
}

// The chunk `later` ones after the next into the L2 cache, a lane for every row.
DEVICE void prefetch_chunk(const Source& from, int later, int lane) {
    if (lane % 8 != 0 || (from.chunk + later * WARPS_K) * CHUNK >= from.K) return;
#pragma unroll
    for (int i = 0; i < 4 * TILES_N; ++i)
        if (from.tile * ROWS + from.row_in_tile + 4 * i < from.N)
            prefetch(from.at + i * i64(4) * from.K + later * WARPS_K * CHUNK);
}

KERNEL(THREADS, 1)
NAME(const u8* codes, const float* scale, const u16* x, const u16* bias, u16* y, int M, int N, int K, i64 x_stride) {
    DYNAMIC_SHARED(dynamic);
    u8* shared = reinterpret_cast<u8*>(dynamic);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int chunks = (K + CHUNK - 1) / CHUNK, tiles = (N + ROWS - 1) / ROWS;
    const int pitch = chunks * CHUNK + 8;  // rows of x 16 bytes past a multiple of 128
    u8* ring = shared + warp * DEPTH * SLOT;
    float* partial = reinterpret_cast<float*>(shared + WARPS_N * WARPS_K * DEPTH * SLOT);  // [2][WARPS_K][M][PITCH]
    float* factor = partial + 2 * WARPS_K * M * PITCH;
    u32(*exponents)[THREADS / 32] = reinterpret_cast<u32(*)[THREADS / 32]>(factor + TOKENS);
    u16* staged = reinterpret_cast<u16*>(exponents + TOKENS);

    const int row_in_tile = warp_n * 16 * TILES_N;
    Source from = source_of(codes, N, K, row_in_tile, warp_k, lane);
    // While the kernel before runs, the L2 cache fetches the first codes; what it writes is not touched.
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) prefetch_chunk(from, d, lane);
    wait_for_previous_kernel();
#if STAGED
    copy_tokens(staged, x, M, K, chunks * CHUNK, pitch, x_stride);
#endif
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy_chunk(ring + d * SLOT, from, lane);
#if STAGED
    wait_for_copies<DEPTH - 1>();
#if X_BF16
    convert_tokens(staged, factor, exponents, M, chunks * CHUNK, pitch);
#endif
    __syncthreads();
#endif
    const u16* tokens[TILES_M];
#pragma unroll
    for (int j = 0; j < TILES_M; ++j) {  // tokens past the end read the last one and are not stored
        const int token = 8 * j + g < M ? 8 * j + g : M - 1;
        tokens[j] = STAGED ? staged + token * pitch : x + token * x_stride;
    }

    int slot = 0, parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
        // A thread stores sums of one row: what they are multiplied with and added to is fetched while they form.
        const int own_row = tile * ROWS + threadIdx.x % ROWS, row_there = own_row < N ? own_row : N - 1;
        const float unit = SCALES < 2 ? scale[SCALES == 1 ? row_there : 0] : 1.0f;
        const float offset = bias != nullptr ? float_of(bias[row_there]) : 0.0f;
        float sum[2][TILES_N][TILES_M][4] = {};  // in turn, so that not every product waits for the one before
        for (int chunk = warp_k; chunk < chunks; chunk += WARPS_K) {
            wait_for_copies<DEPTH - 2>();
            sync_warp();  // the chunk is here for all, and all have read the slot that is filled next
            copy_chunk(ring + (slot == 0 ? DEPTH - 1 : slot - 1) * SLOT, from, lane);
            u8* w = ring + slot * SLOT;
            slot = slot == DEPTH - 1 ? 0 : slot + 1;
#if SCALES == 2
            float part[2][TILES_N][TILES_M][4] = {};
#else
            float(&part)[2][TILES_N][TILES_M][4] = sum;
#endif
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = chunk * CHUNK + half * 64 + t * 16;
                Words b[TILES_M][2];
#pragma unroll
                for (int j = 0; j < TILES_M; ++j) {
#pragma unroll
                    for (int part8 = 0; part8 < 2; ++part8) {
                        // Past the end x is zero as well: a weight of zero times what lies there could be NaN.
#if STAGED
                        b[j][part8] = words(shared_vector(tokens[j] + k + 8 * part8));
#else
                        b[j][part8] = words(k < K ? load_shared_by_all(tokens[j] + k + 8 * part8) : uint4{0, 0, 0, 0});
#endif
                    }
                }
#pragma unroll
                for (int i = 0; i < TILES_N; ++i) {
                    const Words upper = words(shared_vector(piece_of(w, 16 * i + g, 4 * half + t)));
                    const Words lower = words(shared_vector(piece_of(w, 16 * i + 8 + g, 4 * half + t)));
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const Pairs up = decode(upper.at[s]), down = decode(lower.at[s]);
                        const u32 a[4] = {up.low, down.low, up.high, down.high};
#pragma unroll
                        for (int j = 0; j < TILES_M; ++j) {
                            const u32 pair[2] = {b[j][s / 2].at[s % 2 * 2], b[j][s / 2].at[s % 2 * 2 + 1]};
                            mma<MMA_BF16>(part[s % 2][i][j], a, pair);
                        }
                    }
                }
            }
#if SCALES == 2
#pragma unroll
            for (int i = 0; i < TILES_N; ++i) {  // a tile's 16 rows lie in one block of 128
                const int row = tile * ROWS + row_in_tile + 16 * i;
                const float s = scale[(row < N ? row : N - 1) / 128 * chunks + chunk];
#pragma unroll
                for (int j = 0; j < TILES_M; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c) sum[0][i][j][c] += (part[0][i][j][c] + part[1][i][j][c]) * s;
            }
#endif
        }
        // Two sets of partial sums take turns: nobody writes one before all have passed the barrier after its last use.
        float* sums = partial + parity * WARPS_K * M * PITCH;
#pragma unroll
        for (int i = 0; i < TILES_N; ++i)
#pragma unroll
            for (int j = 0; j < TILES_M; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) {  // accumulator layout of m16n8k16: rows g, g + 8; columns 2t, 2t + 1
                    const int token = 8 * j + 2 * t + c % 2, row = row_in_tile + 16 * i + 8 * (c / 2) + g;
                    const float total = SCALES == 2 ? sum[0][i][j][c] : sum[0][i][j][c] + sum[1][i][j][c];
                    if (token < M) sums[(warp_k * M + token) * PITCH + row] = total;
                }
        __syncthreads();
        for (int token = threadIdx.x / ROWS; token < M && own_row < N; token += THREADS / ROWS) {
            float total = 0.0f;
#pragma unroll
            for (int k = 0; k < WARPS_K; ++k) total += sums[(k * M + token) * PITCH + threadIdx.x % ROWS];
            total *= DECODE_UNIT;
            if (STAGED && X_BF16) total *= factor[token];
            total = total * unit + offset;
            y[i64(token) * N + own_row] = rounded(total);
        }
    }
}
