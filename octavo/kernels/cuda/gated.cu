// The gated activation of an MLP between its FP8 products: h = act(gate) * up, act SiLU or GELU (tanh).
//
// Forward: 16-bit gate, up [M, K] -> codes and scales per token of h, which the next product reads, and of gate and up,
// which the backward pass reads. Backward: dH 16 bit and those codes -> dGate, dUp 16 bit (for the adapters), and
// the codes [M, 2 K] of (dGate * columns | dUp * columns) with one scale a token, for dX as one product. Float32
// inside; what is quantized in the backward pass is the rounded dGate and dUp.
//
// One block a token, which passes over its row twice: once for the scales, once, from the caches, for the codes. Few
// registers and many warps are faster here than a row in registers, or four rows that share the columns (measured).
// The codes that the next product reads are `pitch` bytes a row apart. Compiled per variant with: NAME, X_BF16, THREADS,
// BACKWARD, GELU. Needs K and pitch % 8 == 0; everything else contiguous.
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

// The scale of a row whose `at(k)` are its values: a second look only where there is an Inf.
template <class At>
DEVICE Scale scale_of_row(float amax, int K, float (&scratch)[2][THREADS / 32], At at) {
    amax = amax_of_block(amax, scratch[0]);
    const bool infinite = amax == INFINITE;
    if (infinite) {
        amax = 0.0f;
        for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) amax = larger(amax, finite_amax(at(k)));
        amax = amax_of_block(amax, scratch[1]);
    }
    return scale_of(amax, infinite);
}

#if BACKWARD

KERNEL(THREADS, 1)
NAME(const u16* dh, const u8* gate, const float* gate_scale, const u8* up, const float* up_scale, const float* columns,
     u16* dgate, u16* dup, u8* codes, float* scale, int K, i64 pitch) {
    SHARED float amax_of_warp[2][THREADS / 32];
    const i64 row = blockIdx.x;
    const float gate_unit = gate_scale[row], up_unit = up_scale[row];
    float amax = 0.0f;
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        const i64 at = row * K + k;
        const Values g = decoded(*reinterpret_cast<const uint2*>(gate + at), gate_unit);
        const Values u = decoded(*reinterpret_cast<const uint2*>(up + at), up_unit);
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
        amax = larger(amax, amax_of(times(to_gate, columns + k)));
        amax = larger(amax, amax_of(times(to_up, columns + K + k)));
    }
    // What follows reads what this thread wrote, from the cache: it would not fit its registers.
    const auto gate_at = [=](int k) {
        return times(values(*reinterpret_cast<const uint4*>(dgate + row * K + k)), columns + k);
    };
    const auto up_at = [=](int k) {
        return times(values(*reinterpret_cast<const uint4*>(dup + row * K + k)), columns + K + k);
    };
    const Scale s = scale_of_row(amax, 2 * K, amax_of_warp, [=](int k) { return k < K ? gate_at(k) : up_at(k - K); });
    if (threadIdx.x == 0) scale[row] = s.value;
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        store_codes(codes + row * pitch + k, gate_at(k), s);
        store_codes(codes + row * pitch + K + k, up_at(k), s);
    }
}

#else

KERNEL(THREADS, 1)
NAME(const u16* gate, const u16* up, u8* codes, float* scale, u8* gate_codes, float* gate_scale, u8* up_codes,
     float* up_scale, int K, i64 pitch) {
    SHARED float amax_of_warp[3][2][THREADS / 32];
    const i64 row = blockIdx.x;
    const auto gate_at = [=](int k) { return values(*reinterpret_cast<const uint4*>(gate + row * K + k)); };
    const auto up_at = [=](int k) { return values(*reinterpret_cast<const uint4*>(up + row * K + k)); };
    float amax[3] = {0.0f, 0.0f, 0.0f};
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        const Values g = gate_at(k), u = up_at(k);
        amax[0] = larger(amax[0], amax_of(product(g, u)));
        amax[1] = larger(amax[1], amax_of(g));
        amax[2] = larger(amax[2], amax_of(u));
    }
    const auto product_at = [=](int k) { return product(gate_at(k), up_at(k)); };
    const Scale s = scale_of_row(amax[0], K, amax_of_warp[0], product_at);
    const Scale gate_unit = scale_of_row(amax[1], K, amax_of_warp[1], gate_at);
    const Scale up_unit = scale_of_row(amax[2], K, amax_of_warp[2], up_at);
    if (threadIdx.x == 0) scale[row] = s.value, gate_scale[row] = gate_unit.value, up_scale[row] = up_unit.value;
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        const i64 at = row * K + k;
        const Values g = gate_at(k), u = up_at(k);
        store_codes(codes + row * pitch + k, product(g, u), s);
        store_codes(gate_codes + at, g, gate_unit);
        store_codes(up_codes + at, u, up_unit);
    }
}

#endif
