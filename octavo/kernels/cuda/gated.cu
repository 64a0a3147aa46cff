// The gated activation of an MLP between its FP8 products: h = act(gate) * up, act SiLU or GELU (tanh).
//
// Forward: 16-bit gate, up [M, K] -> codes and scales per token of h, which the next product reads, and of gate and up,
// which the backward pass reads. Backward: dH 16 bit and those codes -> dGate, dUp 16 bit (for the adapters), and
// the codes [M, 2 K] of (dGate * columns | dUp * columns) with one scale a token, for dX as one product. Float32
// inside; what is quantized in the backward pass is the rounded dGate and dUp.
//
// Two looks at a row: for the scales, then for the codes. Forward: one block a token, which holds its row in registers
// for ROUNDS up to IN_REGISTERS. Compiled per variant with: NAME, X_BF16, THREADS, BACKWARD, GELU, and ROUNDS (forward,
// K <= 8 * THREADS * ROUNDS) or ROWS (backward). Needs K % 8 == 0; everything contiguous.
#include "rows.cuh"

#define LOG2_E 1.4426950408889634f

struct Activation {
    float value, slope;
};

DEVICE Activation activation(float x) {
#if GELU
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
    const float tanh = 1.0f - 2.0f * reciprocal_approximately(1.0f + exp2_approximately(2.0f * LOG2_E * inner));
    const float inner_slope = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return {0.5f * x * (1.0f + tanh), 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * inner_slope};
#else
    const float sigmoid = reciprocal_approximately(1.0f + exp2_approximately(-LOG2_E * x));
    return {x * sigmoid, sigmoid * (1.0f + x * (1.0f - sigmoid))};
#endif
}

DEVICE Values product(const Values& gate, const Values& up) {
    Values h;
#pragma unroll
    for (int i = 0; i < 8; ++i) h.at[i] = activation(gate.at[i]).value * up.at[i];
    return h;
}

#if BACKWARD

// ROWS rows a block: the columns come from the L2 cache, and would be most of what is read if each row read them anew.
KERNEL(THREADS, 1)
NAME(const u16* dh, const u8* gate, const float* gate_scale, const u8* up, const float* up_scale, const float* columns,
     u16* dgate, u16* dup, u8* codes, float* scale, int M, int K) {
    SHARED float amax_of_warp[ROWS][2][THREADS / 32];
    const i64 first = i64(blockIdx.x) * ROWS;
    const int rows = M - first < ROWS ? int(M - first) : ROWS;
    float amax[ROWS] = {};
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) continue;
            const i64 at = (first + r) * K + k;
            const Values g = decoded(load_codes(gate + at), gate_scale[first + r]);
            const Values u = decoded(load_codes(up + at), up_scale[first + r]);
            const Values d = values(load_once(dh + at));
            Values to_gate, to_up;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const Activation a = activation(g.at[i]);
                to_gate.at[i] = float_of(rounded(d.at[i] * u.at[i] * a.slope));
                to_up.at[i] = float_of(rounded(d.at[i] * a.value));
            }
            store_rounded(dgate + at, to_gate);
            store_rounded(dup + at, to_up);
            amax[r] = larger(amax[r], amax_of(times(to_gate, columns + k)));
            amax[r] = larger(amax[r], amax_of(times(to_up, columns + K + k)));
        }
    }
    // What follows reads what this block wrote, from the caches: it would not fit its registers.
    const auto gate_at = [=](i64 row, int k) {
        return times(values(*reinterpret_cast<const uint4*>(dgate + row * K + k)), columns + k);
    };
    const auto up_at = [=](i64 row, int k) {
        return times(values(*reinterpret_cast<const uint4*>(dup + row * K + k)), columns + K + k);
    };
    Scale s[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        amax[r] = amax_of_block(amax[r], amax_of_warp[r][0]);
        const bool infinite = amax[r] == INFINITE;
        if (infinite) {
            amax[r] = 0.0f;
            for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
                amax[r] = larger(amax[r], finite_amax(gate_at(first + r, k)));
                amax[r] = larger(amax[r], finite_amax(up_at(first + r, k)));
            }
            amax[r] = amax_of_block(amax[r], amax_of_warp[r][1]);
        }
        s[r] = scale_of(amax[r], infinite);
        if (threadIdx.x == 0 && r < rows) scale[first + r] = s[r].value;
    }
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) continue;
            const i64 row = first + r;
            store_codes(codes + 2 * row * K + k, gate_at(row, k), s[r]);
            store_codes(codes + (2 * row + 1) * K + k, up_at(row, k), s[r]);
        }
    }
}

#else

KERNEL(THREADS, 1)
NAME(const u16* gate, const u16* up, u8* codes, float* scale, u8* gate_codes, float* gate_scale, u8* up_codes,
     float* up_scale, int K) {
    SHARED float amax_of_warp[3][2][THREADS / 32];
    const i64 row = blockIdx.x;
    const auto load = [=](const u16* from, int r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        return k < K ? load_shared_by_all(from + row * K + k) : uint4{0, 0, 0, 0};
    };
#if ROUNDS > IN_REGISTERS
    const auto gate_at = [=](int r) { return values(load(gate, r)); };
    const auto up_at = [=](int r) { return values(load(up, r)); };
#else
    uint4 gates[ROUNDS], ups[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) gates[r] = load(gate, r), ups[r] = load(up, r);
    const auto gate_at = [&](int r) { return forget(gates[r]), values(gates[r]); };
    const auto up_at = [&](int r) { return forget(ups[r]), values(ups[r]); };
#endif
    float amax[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll UNROLL
    for (int r = 0; r < ROUNDS; ++r) {
        const Values g = gate_at(r), u = up_at(r);
        amax[0] = larger(amax[0], amax_of(product(g, u)));
        amax[1] = larger(amax[1], amax_of(g));
        amax[2] = larger(amax[2], amax_of(u));
    }
    Scale s[3];
    bool infinite[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        amax[i] = amax_of_block(amax[i], amax_of_warp[i][0]);
        infinite[i] = amax[i] == INFINITE;
    }
    if (infinite[0] || infinite[1] || infinite[2]) {
        float finite[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll UNROLL
        for (int r = 0; r < ROUNDS; ++r) {
            const Values g = gate_at(r), u = up_at(r);
            finite[0] = larger(finite[0], finite_amax(product(g, u)));
            finite[1] = larger(finite[1], finite_amax(g));
            finite[2] = larger(finite[2], finite_amax(u));
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) amax[i] = amax_of_block(finite[i], amax_of_warp[i][1]);
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) s[i] = scale_of(amax[i], infinite[i]);
    if (threadIdx.x == 0) scale[row] = s[0].value, gate_scale[row] = s[1].value, up_scale[row] = s[2].value;
#pragma unroll UNROLL
    for (int r = 0; r < ROUNDS; ++r) {
        const int k = (r * THREADS + threadIdx.x) * 8;
        if (k >= K) continue;
        const i64 at = row * K + k;
        const Values g = gate_at(r), u = up_at(r);
        store_codes(codes + at, product(g, u), s[0]);
        store_codes(gate_codes + at, g, s[1]);
        store_codes(up_codes + at, u, s[2]);
    }
}

#endif
