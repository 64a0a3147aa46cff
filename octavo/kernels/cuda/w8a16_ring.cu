// y = x W^T for few tokens: x 16 bit [M, K], W FP8 codes [N, K] as files hold them, y 16 bit [M, N].
//
// Decoding is bound by reading W once. The grid is as large as the GPU: a block takes every gridDim.x-th tile of ROWS
// rows, and its WARPS_K warps deal the chunks of 128 of K among themselves. A warp copies its chunks DEPTH - 1 ahead into
// a ring in shared memory that only it reads, across the ends of tiles: the memory never waits for a sum. A lane copies
// what it will read, so nothing is synchronized. Partial sums meet in shared memory in a fixed order: no atomics, no
// locks, the same bits every time, whatever the grid.
//
// STAGED: x lies in shared memory as FP16, a token times a power of two that brings its largest value below 2**15, which
// the sum is divided by. For BF16 that is exact for values down to 2**-32 of the largest, and off by 2**-40 of it at most
// below; it makes W's codes FP16 operands, which cost less to decode than BF16 ones. Otherwise x comes from L1 as it is.
// Up to 8 tokens cost what one costs.
//
// Compiled per variant with: NAME, X_BF16, E5M2, SCALES (0 tensor, 1 row, 2 block 128 x 128), TILES_N, TILES_M,
// WARPS_N, WARPS_K, DEPTH, STAGED, EARLY (before the kernel before has ended: 1 copy codes, 2 have the L2 cache fetch
// them). Needs K % 16 == 0 and rows of x on 16-byte boundaries; dynamic shared memory as
// kernels/tiling.py says.
#define MMA_BF16 (X_BF16 && !STAGED)
#include "w8a16.cuh"

#define THREADS (32 * WARPS_N * WARPS_K)
#define ROWS (16 * TILES_N * WARPS_N)
#define TOKENS (8 * TILES_M)
// Lanes of a warp write rows g and tokens 2t: a stride of 4 past a multiple of 16 keeps them in different banks.
#define PITCH (ROWS + 4)
#define SLOT (TILES_N * 4 * 32 * 16)

DEVICE int exponent_of_bf16(u32 bits) {  // of a finite value; 0 for others
    const int exponent = int(bits >> 7 & 0xFFu);
    return exponent == 255 ? 0 : exponent;
}

// x to shared memory, rows of `pitch` values, zeros past K. factor[token] undoes what a token was multiplied with.
DEVICE void stage(u16* staged, float* factor, int (*exponents)[THREADS / 32], const u16* x, int M, int K, int pitch,
                  i64 x_stride) {
    const int width = (K + CHUNK - 1) / CHUNK * (CHUNK / 8);
    for (int token = 0; token < M; ++token) {
        int largest = 0;
        for (int at = threadIdx.x; at < width; at += THREADS) {
            const uint4 v = at * 8 < K ? load_shared_by_all(x + token * x_stride + at * 8) : uint4{0, 0, 0, 0};
            *reinterpret_cast<uint4*>(staged + token * pitch + at * 8) = v;
#if X_BF16
            const Words w = words(v);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int low = exponent_of_bf16(w.at[i]), high = exponent_of_bf16(w.at[i] >> 16);
                largest = largest > low ? largest : low;
                largest = largest > high ? largest : high;
            }
#endif
        }
#if X_BF16
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            const int other = int(exchange(float(largest), mask));
            largest = largest > other ? largest : other;
        }
        if (threadIdx.x % 32 == 0) exponents[token][threadIdx.x / 32] = largest;
#endif
    }
#if X_BF16
    __syncthreads();
    for (int token = 0; token < M; ++token) {
        int largest = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) {
            const int other = exponents[token][warp];
            largest = largest > other ? largest : other;
        }
        const int up = largest < 15 ? 126 : 141 - largest;  // exponent of the factor; 127 is the bias
        const float multiplier = float_of_bits(u32(up + 127) << 23);
        if (threadIdx.x == 0) factor[token] = float_of_bits(u32(127 - up) << 23);
        for (int at = threadIdx.x; at < width; at += THREADS) {
            uint4* place = reinterpret_cast<uint4*>(staged + token * pitch + at * 8);
            Words w = words(*place);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                w.at[i] = fp16x2_of_floats(float_of_bits(w.at[i] << 16) * multiplier,
                                           float_of_bits(w.at[i] & 0xFFFF0000u) * multiplier);
            }
            *place = vector(w);
        }
    }
#endif
    __syncthreads();
}

// Where the next chunk to copy comes from.
struct Source {
    const u8* codes;
    int N, K, chunks, tiles, tile, chunk;
};

DEVICE void copy_chunk(u8* slot, Source& from, int row_in_tile, int first_chunk, int lane) {
    const int g = lane / 4, t = lane % 4;
    if (from.tile < from.tiles) {
#pragma unroll
        for (int i = 0; i < TILES_N; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {  // rows past the end read the last one and are not stored
                const int row = from.tile * ROWS + row_in_tile + 16 * i + 8 * r + g;
                const u8* at = from.codes + i64(row < from.N ? row : from.N - 1) * from.K;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int k = from.chunk * CHUNK + half * 64 + t * 16;
                    const bool inside = k < from.K;
                    copy_later(slot + (((i * 2 + r) * 2 + half) * 32 + lane) * 16, inside ? at + k : at, inside);
                }
            }
        }
        from.chunk += WARPS_K;
        if (from.chunk >= from.chunks) from.chunk = first_chunk, from.tile += gridDim.x;
    }
    end_of_copies();
}

// A chunk of the block's first tile into the L2 cache, a lane every 128 bytes of a row.
DEVICE void prefetch_chunk(const Source& from, int row_in_tile, int chunk, int lane) {
    const int row = from.tile * ROWS + row_in_tile + lane;
    if (lane < 16 * TILES_N && row < from.N && chunk < from.chunks)
        prefetch(from.codes + i64(row) * from.K + chunk * CHUNK);
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
    float(*partial)[WARPS_K][TOKENS][PITCH] =
        reinterpret_cast<float(*)[WARPS_K][TOKENS][PITCH]>(shared + WARPS_N * WARPS_K * DEPTH * SLOT);
    float* factor = reinterpret_cast<float*>(partial + 2);
    int(*exponents)[THREADS / 32] = reinterpret_cast<int(*)[THREADS / 32]>(factor + TOKENS);
    u16* staged = reinterpret_cast<u16*>(exponents + TOKENS);

    Source from = {codes, N, K, chunks, warp_k < chunks ? tiles : 0, int(blockIdx.x), warp_k};
    const int row_in_tile = warp_n * 16 * TILES_N;
#if EARLY == 2
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) prefetch_chunk(from, row_in_tile, warp_k + d * WARPS_K, lane);
#endif
#if EARLY != 1
    wait_for_previous_kernel();
#endif
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) copy_chunk(ring + d * SLOT, from, row_in_tile, warp_k, lane);
#if EARLY == 1
    wait_for_previous_kernel();
#endif
#if STAGED
    stage(staged, factor, exponents, x, M, K, pitch, x_stride);
#endif
    const u16* tokens[TILES_M];
#pragma unroll
    for (int j = 0; j < TILES_M; ++j) {  // tokens past the end read the last one and are not stored
        const int token = 8 * j + g < M ? 8 * j + g : M - 1;
        tokens[j] = STAGED ? staged + token * pitch : x + token * x_stride;
    }

    int slot = 0, parity = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
        float sum[TILES_N][TILES_M][4] = {};
        for (int chunk = warp_k; chunk < chunks; chunk += WARPS_K) {
            wait_for_copies<DEPTH - 2>();
            // Into the slot that was read in the turn before.
            copy_chunk(ring + (slot == 0 ? DEPTH - 1 : slot - 1) * SLOT, from, row_in_tile, warp_k, lane);
            const u8* w = ring + slot * SLOT + lane * 16;
            slot = slot == DEPTH - 1 ? 0 : slot + 1;
#if SCALES == 2
            float part[TILES_N][TILES_M][4] = {};
#else
            float(&part)[TILES_N][TILES_M][4] = sum;
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
                    const Words upper = words(shared_vector(w + ((i * 2 + 0) * 2 + half) * 512));
                    const Words lower = words(shared_vector(w + ((i * 2 + 1) * 2 + half) * 512));
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const Pairs up = decode(upper.at[s]), down = decode(lower.at[s]);
                        const u32 a[4] = {up.low, down.low, up.high, down.high};
#pragma unroll
                        for (int j = 0; j < TILES_M; ++j) {
                            const u32 pair[2] = {b[j][s / 2].at[s % 2 * 2], b[j][s / 2].at[s % 2 * 2 + 1]};
                            mma(part[i][j], a, pair);
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
                    for (int c = 0; c < 4; ++c) sum[i][j][c] += part[i][j][c] * s;
            }
#endif
        }
        // Two sets of partial sums take turns: nobody writes one before all have passed the barrier after its last use.
#pragma unroll
        for (int i = 0; i < TILES_N; ++i)
#pragma unroll
            for (int j = 0; j < TILES_M; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c)  // accumulator layout of m16n8k16: rows g, g + 8; columns 2t, 2t + 1
                    partial[parity][warp_k][8 * j + 2 * t + c % 2][row_in_tile + 16 * i + 8 * (c / 2) + g] =
                        sum[i][j][c];
        __syncthreads();
        for (int at = threadIdx.x; at < ROWS * M; at += THREADS) {
            const int row = tile * ROWS + at % ROWS, token = at / ROWS;
            if (row >= N) continue;
            float total = 0.0f;
#pragma unroll
            for (int k = 0; k < WARPS_K; ++k) total += partial[parity][k][token][at % ROWS];
            total *= DECODE_UNIT;
            if (STAGED && X_BF16) total *= factor[token];
            if (SCALES < 2) total *= scale[SCALES == 1 ? row : 0];
            if (bias != nullptr) total += float_of(bias[row]);
            y[i64(token) * N + row] = rounded(total);
        }
    }
}
