// The gated activation of an MLP between its FP8 products: h = act(gate) * up, act SiLU or GELU (tanh).
//
// Forward: 16-bit gate, up [M, K] -> codes and scales per token of h, which the next product reads, and of gate and up,
// which the backward pass reads. Backward: dH 16 bit and those codes -> dGate, dUp 16 bit (for the adapters), and
// the codes [M, 2 K] of (dGate * columns | dUp * columns) with one scale a token, for dX as one product. Float32
// inside; what is quantized in the backward pass is the rounded dGate and dUp.
//
// Both look at a row twice: for the scales, then for the codes. Forward, and backward with STAGES 1: one block a token,
// few registers, and the second look is at the caches. Backward with more: a block takes every gridDim.x-th token,
// rows are on their way into shared memory (32 * THREADS * ROUNDS bytes each) while others are worked on, and the columns
// stay in registers, which is what it gains by.
// The codes that the next product reads are `pitch` bytes a row apart. Compiled per variant with: NAME, X_BF16, BACKWARD,
// GELU, THREADS, ROUNDS, BLOCKS a multiprocessor, backward STAGES. Needs K and pitch % 8 == 0 and
// K <= 8 * THREADS * ROUNDS; everything else contiguous. dGate may be dH's place.
#include "activation.cuh"

#if BACKWARD

#if !defined(OCTAVO_HOST) && __CUDA_ARCH__ < 890
#define COLUMNS 0  // converting in software leaves no registers for them
#else
#define COLUMNS (STAGES > 1)
#endif

KERNEL(THREADS, BLOCKS)
NAME(const u16* dh, const u8* gate, const float* gate_scale, const u8* up, const float* up_scale, const float* columns,
     u16* dgate, u16* dup, u8* codes, float* scale, i64 M, int K, i64 pitch) {
    wait_for_previous_kernel();
    SHARED u32 amax_of_warp[2][WARPS], rare[WARPS];
    DYNAMIC_SHARED(staged);
    const auto column = [](int r) { return (r * THREADS + int(threadIdx.x)) * 8; };
    // a stage: dh of all, then gate's codes, then up's
    const auto dh_at = [&](int stage, int r) { return staged + stage * ROUNDS * THREADS * 2 + r * THREADS + threadIdx.x; };
    const auto codes_at = [&](int stage, int which, int r) {
        return reinterpret_cast<uint2*>(staged + (stage * 2 + 1) * ROUNDS * THREADS) + (which * ROUNDS + r) * THREADS +
               threadIdx.x;
    };
    const auto stage = [&](i64 row, int to) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (row < M && column(r) < K) {
                copy_later(dh_at(to, r), dh + row * K + column(r));
                copy_later(codes_at(to, 0, r), gate + row * K + column(r));
                copy_later(codes_at(to, 1, r), up + row * K + column(r));
            }
        end_of_copies();
    };
#if COLUMNS
    Values by[2][ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        by[0][r] = floats(columns + (column(r) < K ? column(r) : 0));
        by[1][r] = floats(columns + (column(r) < K ? K + column(r) : 0));
    }
    const auto folded = [&](const uint4& v, int which, int r) { return times(values(v), by[which][r]); };
#else
    const auto folded = [&](const uint4& v, int which, int r) {
        return times(values(v), floats(columns + (column(r) < K ? which * K + column(r) : 0)));
    };
#endif
#if STAGES > 1
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) stage(blockIdx.x + i64(i) * gridDim.x, i);
#endif
    int turn = 0;
    for (i64 row = blockIdx.x; row < M; row += gridDim.x, ++turn) {
        const float gate_unit = gate_scale[row], up_unit = up_scale[row];
#if STAGES > 1
        wait_for_copies<STAGES - 2>();
        stage(row + i64(STAGES - 1) * gridDim.x, (turn + STAGES - 1) % STAGES);
#endif
        float amax = 0.0f;
#pragma unroll (STAGES > 1 ? ROUNDS : 1)
        for (int r = 0; r < ROUNDS; ++r) {
            const i64 at = row * K + column(r);
            const bool inside = column(r) < K;
#if STAGES > 1
            const uint4 from = inside ? *dh_at(turn % STAGES, r) : uint4{0, 0, 0, 0};
            const uint2 gate_codes = inside ? *codes_at(turn % STAGES, 0, r) : uint2{0, 0};
            const uint2 up_codes = inside ? *codes_at(turn % STAGES, 1, r) : uint2{0, 0};
#else
            const uint4 from = inside ? *reinterpret_cast<const uint4*>(dh + at) : uint4{0, 0, 0, 0};
            const uint2 gate_codes = inside ? *reinterpret_cast<const uint2*>(gate + at) : uint2{0, 0};
            const uint2 up_codes = inside ? *reinterpret_cast<const uint2*>(up + at) : uint2{0, 0};
#endif
            const Values d = values(from), g = decoded(gate_codes, gate_unit), u = decoded(up_codes, up_unit);
            Values first, second;
            gradients(d, g, u, first, second);
            const uint4 one = rounded(first), other = rounded(second);
            if (inside) {
                *reinterpret_cast<uint4*>(dgate + at) = one;
                *reinterpret_cast<uint4*>(dup + at) = other;
            }
            amax = larger(amax, amax_of(folded(one, 0, r)));
            amax = larger(amax, amax_of(folded(other, 1, r)));
#if STAGES > 1
            *dh_at(turn % STAGES, r) = one;
            *codes_at(turn % STAGES, 0, r) = uint2{other.x, other.y};
            *codes_at(turn % STAGES, 1, r) = uint2{other.z, other.w};
#endif
        }
#if STAGES > 1
        const auto again = [&](int which, int r) {
            const uint2 low = *codes_at(turn % STAGES, 0, r), high = *codes_at(turn % STAGES, 1, r);
            const uint4 found = which ? uint4{low.x, low.y, high.x, high.y} : *dh_at(turn % STAGES, r);
            return folded(column(r) < K ? found : uint4{0, 0, 0, 0}, which, r);
        };
#else
        // What this thread wrote, from the cache.
        const auto again = [&](int which, int r) {
            const u16* from = (which ? dup : dgate) + row * K + column(r);
            return folded(column(r) < K ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0}, which, r);
        };
#endif
        leave_amax(amax, amax_of_warp[turn % 2]);
        __syncthreads();
        const Scale s = scale_of_row(take_amax(amax_of_warp[turn % 2]), rare, [&] {
            float finite = 0.0f;
#pragma unroll (STAGES > 1 ? ROUNDS : 1)
            for (int r = 0; r < ROUNDS; ++r)
                finite = larger(larger(finite, finite_amax(again(0, r))), finite_amax(again(1, r)));
            return finite;
        });
        if (threadIdx.x == 0) scale[row] = s.value;
#pragma unroll (STAGES > 1 ? ROUNDS : 1)
        for (int r = 0; r < ROUNDS; ++r) {
            if (column(r) >= K) continue;
            store_codes(codes + row * pitch + column(r), again(0, r), s);
            store_codes(codes + row * pitch + K + column(r), again(1, r), s);
        }
    }
}

#else

KERNEL(THREADS, BLOCKS)
NAME(const u16* gate, const u16* up, u8* codes, float* scale, u8* gate_codes, float* gate_scale, u8* up_codes,
     float* up_scale, i64 M, int K, i64 pitch) {
    wait_for_previous_kernel();
    SHARED u32 amax_of_warp[3][WARPS], rare[WARPS];
    const i64 row = blockIdx.x;
    const auto column = [](int r) { return (r * THREADS + int(threadIdx.x)) * 8; };
    const auto at = [&](int which, int r) {
        const u16* from = (which ? up : gate) + row * K + column(r);
        return column(r) < K ? load_shared_by_all(from) : uint4{0, 0, 0, 0};
    };
    const auto product_at = [&](int r) { return product(values(at(0, r)), values(at(1, r))); };
    float amax[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int r = 0; r < ROUNDS; ++r) {
        const Values g = values(at(0, r)), u = values(at(1, r));
        amax[0] = larger(amax[0], amax_of(product(g, u)));
        amax[1] = larger(amax[1], amax_of(g));
        amax[2] = larger(amax[2], amax_of(u));
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) leave_amax(amax[i], amax_of_warp[i]);
    __syncthreads();
    const auto scale_from = [&](int i) {
        return scale_of_row(take_amax(amax_of_warp[i]), rare, [&] {
            float finite = 0.0f;
#pragma unroll 1
            for (int r = 0; r < ROUNDS; ++r)
                finite = larger(finite, finite_amax(i == 0 ? product_at(r) : values(at(i - 1, r))));
            return finite;
        });
    };
    const Scale s = scale_from(0);
    const Reciprocal gate_unit = reciprocal_of(scale_from(1)), up_unit = reciprocal_of(scale_from(2));
    if (threadIdx.x == 0) scale[row] = s.value, gate_scale[row] = gate_unit.value, up_scale[row] = up_unit.value;
#pragma unroll 1
    for (int r = 0; r < ROUNDS; ++r) {
        const i64 to = row * K + column(r);
        if (column(r) >= K) continue;
        store_codes(codes + row * pitch + column(r), product_at(r), s);
        store_codes(gate_codes + to, at(0, r), gate_unit);
        store_codes(up_codes + to, at(1, r), up_unit);
    }
}

#endif
