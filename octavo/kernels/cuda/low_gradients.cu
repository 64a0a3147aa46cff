// One pass over a gradient dY, bfloat16 [M, N], for an adapter of rank r <= 16 * RANKS: dY B [M, r] and dY^T low [N, r].
//
// A block takes COLUMNS columns and `chunk` tokens, 16 tokens a stage on their way into shared memory while others are
// worked on. A warp has 64 of the columns: their tokens are A of mma.m16n8k16 for dY B, read by turned matrices they are
// A for dY^T low, whose sums stay in registers. Sums of both products are of a block's own columns and tokens: float32
// [strip, M, 16 * RANKS] and [chunk, N, 16 * RANKS], to be added by whoever wants the same bits every time (sum_parts.cu).
// B float32, low bfloat16 with rows low_pitch apart. Sixteen bytes of a row lie swizzled by the token, so that reading
// eight tokens of one place has no bank conflicts. Compiled with: NAME, RANKS (1 or 2), STAGES. Needs N % 8 == 0, dY on 16
// bytes, chunk % 16 == 0.
#include "device.cuh"

#define WARPS 8
#define COLUMNS (64 * WARPS)
#define VECTORS (COLUMNS / 8)
#define TOKENS 16
#define WIDTH (16 * RANKS)
#define LOW_PITCH (WIDTH + 8)

// Four rows of eight sums are in different banks, and so are all sums of two rows.
DEVICE int swizzled(int row, int column) { return column ^ (row & 2) << 2; }

KERNEL(32 * WARPS, 3 - RANKS)
NAME(const u16* dy, const float* b, const u16* low, float* du, float* db, i64 M, int N, int r, i64 low_pitch, int chunk) {
    wait_for_previous_kernel();
    DYNAMIC_SHARED(staged);
    SHARED float of_warp[2][WARPS][TOKENS][WIDTH];
    SHARED uint4 lows_of[2][TOKENS * LOW_PITCH / 8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int strip = blockIdx.x * COLUMNS, mine = strip + 64 * warp;
    const i64 first = i64(blockIdx.y) * chunk, end = first + chunk < M ? first + chunk : M;
    const auto stage = [&](i64 begin, int at) {
#pragma unroll
        for (int i = 0; i < TOKENS * VECTORS / (32 * WARPS); ++i) {
            const int token = (threadIdx.x + 32 * WARPS * i) / VECTORS, v = threadIdx.x % VECTORS;
            const bool inside = begin + token < end && strip + 8 * v < N;
            copy_later(static_cast<void*>(staged + (at * TOKENS + token) * VECTORS + (v ^ token % 8)),
                       dy + (inside ? (begin + token) * N + strip + 8 * v : 0), inside);
        }
        end_of_copies();
    };
    u16 ahead[RANKS];  // of low, for the next stage
    const auto fetch = [&](i64 begin) {
#pragma unroll
        for (int i = 0; i < RANKS; ++i) {
            const int at = threadIdx.x + 32 * WARPS * i, j = at % WIDTH;
            const i64 token = begin + at / WIDTH;
            ahead[i] = token < end && j < r ? low[token * low_pitch + j] : u16(0);
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) stage(first + TOKENS * i, i);
    fetch(first);
    u32 right[4][2 * RANKS][2];  // B as it is multiplied: columns 16k + 2t + (0, 1) and 8 more, rank 8n + g
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = 0; n < 2 * RANKS; ++n)
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const int column = mine + 16 * k + 2 * t + 8 * upper, j = 8 * n + g;
                const bool inside = j < r && column < N;  // N is even
                right[k][n][upper] = bf16x2_of_floats(inside ? b[i64(column) * r + j] : 0.0f,
                                                      inside ? b[i64(column + 1) * r + j] : 0.0f);
            }
    float of_b[4][2 * RANKS][4] = {};
    const auto write_sums = [&](i64 begin, int turn) {
#pragma unroll
        for (int i = threadIdx.x; i < TOKENS * WIDTH; i += 32 * WARPS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += of_warp[turn % 2][w][i / WIDTH][swizzled(i / WIDTH, i % WIDTH)];
            if (begin + i / WIDTH < end) du[(i64(blockIdx.x) * M + begin) * WIDTH + i] = sum;
        }
    };
    int turn = 0;
    for (i64 begin = first; begin < end; begin += TOKENS, ++turn) {
        u16* lows = reinterpret_cast<u16*>(lows_of[turn % 2]);
#pragma unroll
        for (int i = 0; i < RANKS; ++i) {
            const int at = threadIdx.x + 32 * WARPS * i;
            lows[at / WIDTH * LOW_PITCH + at % WIDTH] = ahead[i];
        }
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        stage(begin + TOKENS * (STAGES - 1), (turn + STAGES - 1) % STAGES);
        fetch(begin + TOKENS);
        if (turn > 0) write_sums(begin - TOKENS, turn - 1);
        // Matrix l / 8 of four: tokens 8 * (l / 8 % 2) on, places 8 * (l / 16) on; turned, the other way round.
        const int token = lane % 8 + lane / 8 % 2 * 8, place = lane / 16;
        const int turned_token = lane % 8 + lane / 16 * 8, turned_place = lane / 8 % 2;
        const uint4* tile = staged + turn % STAGES * TOKENS * VECTORS;
        u32 left[RANKS][4];  // low: tokens 2t, 2t + 1 and 8 more, ranks g and g + 8
#pragma unroll
        for (int n = 0; n < RANKS; ++n) load_turned_matrices(left[n], lows + token * LOW_PITCH + 16 * n + 8 * place);
        float of_u[2 * RANKS][4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int v = warp * 8 + 2 * k;
            u32 a[4];
            load_matrices(a, tile + token * VECTORS + (v + place ^ token % 8));
#pragma unroll
            for (int n = 0; n < 2 * RANKS; ++n) mma_bf16(of_u[n], a, right[k][n]);
            load_turned_matrices(a, tile + turned_token * VECTORS + (v + turned_place ^ turned_token % 8));
#pragma unroll
            for (int n = 0; n < RANKS; ++n) {
                const u32 lower[2] = {left[n][0], left[n][1]}, upper[2] = {left[n][2], left[n][3]};
                mma_bf16(of_b[k][2 * n], a, lower);
                mma_bf16(of_b[k][2 * n + 1], a, upper);
            }
        }
#pragma unroll
        for (int n = 0; n < 2 * RANKS; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                *reinterpret_cast<float2*>(&of_warp[turn % 2][warp][g + 8 * i][swizzled(g, 8 * n + 2 * t)]) =
                    float2{of_u[n][2 * i], of_u[n][2 * i + 1]};
            }
    }
    __syncthreads();
    write_sums(first + TOKENS * (turn - 1), turn - 1);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int n = 0; n < 2 * RANKS; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = mine + 16 * k + g + 8 * i;
                if (column >= N) continue;
                *reinterpret_cast<float2*>(db + (i64(blockIdx.y) * N + column) * WIDTH + 8 * n + 2 * t) =
                    float2{of_b[k][n][2 * i], of_b[k][n][2 * i + 1]};
            }
}
