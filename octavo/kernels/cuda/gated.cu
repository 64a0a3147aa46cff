// The gated activation of an MLP between its FP8 products: h = act(gate) * up, act SiLU or GELU (tanh).
//
// Forward: 16-bit gate, up [M, K] -> codes and scales per token of h, which the next product reads, and of gate and up,
// which the backward pass reads. Backward: dH 16 bit and those codes -> dGate, dUp 16 bit (for the adapters), and
// the codes [M, 2 K] of (dGate * columns | dUp * columns) with one scale a token, for dX as one product. Float32
// inside; what is quantized in the backward pass is the rounded dGate and dUp.
//
// One block a token, which passes over its row twice: once for the scales, once, from the caches, for the codes.
// Compiled per variant with: NAME, X_BF16, BACKWARD, GELU. Needs K % 8 == 0; everything contiguous.
#define THREADS 512
#include "rows.cuh"

struct Activation {
    float value, slope;
};

DEVICE Activation activation(float x) {
#if GELU
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
    const float tanh = 1.0f - 2.0f / (1.0f + expf(2.0f * inner));
    const float inner_slope = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return {0.5f * x * (1.0f + tanh), 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * inner_slope};
#else
    const float sigmoid = 1.0f / (1.0f + expf(-x));
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

KERNEL(THREADS, 1)
NAME(const u16* dh, const u8* gate, const float* gate_scale, const u8* up, const float* up_scale, const float* columns,
     u16* dgate, u16* dup, u8* codes, float* scale, int K) {
    SHARED float amax_of_warp[THREADS / 32];
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
        amax = larger(amax, finite_amax(times(to_gate, columns + k)));
        amax = larger(amax, finite_amax(times(to_up, columns + K + k)));
    }
    const float s = scale_of(amax_of_block(amax, amax_of_warp));
    if (threadIdx.x == 0) scale[row] = s;
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        const i64 at = row * K + k;
        const Values to_gate = values(*reinterpret_cast<const uint4*>(dgate + at));
        const Values to_up = values(*reinterpret_cast<const uint4*>(dup + at));
        store_codes(codes + 2 * row * K + k, times(to_gate, columns + k), s);
        store_codes(codes + (2 * row + 1) * K + k, times(to_up, columns + K + k), s);
    }
}

#else

KERNEL(THREADS, 1)
NAME(const u16* gate, const u16* up, u8* codes, float* scale, u8* gate_codes, float* gate_scale, u8* up_codes,
     float* up_scale, int K) {
    SHARED float amax_of_warp[3][THREADS / 32];
    const i64 row = blockIdx.x;
    float amax[3] = {0.0f, 0.0f, 0.0f};
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        const Values g = values(*reinterpret_cast<const uint4*>(gate + row * K + k));
        const Values u = values(*reinterpret_cast<const uint4*>(up + row * K + k));
        amax[0] = larger(amax[0], finite_amax(product(g, u)));
        amax[1] = larger(amax[1], finite_amax(g));
        amax[2] = larger(amax[2], finite_amax(u));
    }
    float s[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) s[i] = scale_of(amax_of_block(amax[i], amax_of_warp[i]));
    if (threadIdx.x == 0) scale[row] = s[0], gate_scale[row] = s[1], up_scale[row] = s[2];
    for (int k = threadIdx.x * 8; k < K; k += THREADS * 8) {
        const i64 at = row * K + k;
        const Values g = values(*reinterpret_cast<const uint4*>(gate + at));
        const Values u = values(*reinterpret_cast<const uint4*>(up + at));
        store_codes(codes + at, product(g, u), s[0]);
        store_codes(gate_codes + at, g, s[1]);
        store_codes(up_codes + at, u, s[2]);
    }
}

#endif
