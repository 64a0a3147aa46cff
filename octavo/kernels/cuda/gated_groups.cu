// The gated activation of an MLP, h = act(gate) * up, with E4M3 codes per group of 128 of a row: each value is seen once.
//
// Forward: 16-bit gate, up [M, K] -> codes and scales of h, gate and up. Backward: dH and the codes of gate and up -> dGate,
// dUp 16 bit and codes and scales of (dGate | dUp) [M, 2 K], of the rounded values. Codes that the next product reads are
// `pitch` bytes a row apart; scales [group, token] lie column by column, M apart. Sixteen lanes a group.
// Compiled with: NAME, X_BF16, BACKWARD, GELU, THREADS. Needs K % 128 == 0; everything else contiguous. dH may be dGate.
#include "activation.cuh"

#if BACKWARD

KERNEL(THREADS, 1)
NAME(const u16* dh, const u8* gate, const float* gate_scale, const u8* up, const float* up_scale, u16* dgate, u16* dup,
     u8* codes, float* scale, i64 M, int K, i64 pitch) {
    wait_for_previous_kernel();
    const int blocks = (K / 8 + THREADS - 1) / THREADS, k = (int(blockIdx.x) % blocks * THREADS + int(threadIdx.x)) * 8;
    const i64 row = blockIdx.x / blocks, place = row * K + k;
    const bool inside = k < K;
    const i64 at = inside ? place : 0, of = inside ? k / 128 * M + row : 0;  // what is outside reads the first group
    const Values d = values(*reinterpret_cast<const uint4*>(dh + at));
    const Values g = decoded(*reinterpret_cast<const uint2*>(gate + at), gate_scale[of]);
    const Values u = decoded(*reinterpret_cast<const uint2*>(up + at), up_scale[of]);
    Values first, second;
    gradients(d, g, u, first, second);
    const uint4 one = rounded(first), other = rounded(second);
    const Scale of_gate = scale_of_group(values(one)), of_up = scale_of_group(values(other));
    if (!inside) return;
    *reinterpret_cast<uint4*>(dgate + at) = one;
    *reinterpret_cast<uint4*>(dup + at) = other;
    store_codes(codes + row * pitch + k, one, reciprocal_of(of_gate));
    store_codes(codes + row * pitch + K + k, other, reciprocal_of(of_up));
    if (threadIdx.x % 16 == 0) scale[of] = of_gate.value, scale[K / 128 * M + of] = of_up.value;
}

#else

KERNEL(THREADS, 1)
NAME(const u16* gate, const u16* up, u8* codes, float* scale, u8* gate_codes, float* gate_scale, u8* up_codes,
     float* up_scale, i64 M, int K, i64 pitch) {
    wait_for_previous_kernel();
    const int blocks = (K / 8 + THREADS - 1) / THREADS, k = (int(blockIdx.x) % blocks * THREADS + int(threadIdx.x)) * 8;
    const i64 row = blockIdx.x / blocks, place = row * K + k;
    const bool inside = k < K;
    const uint4 one = inside ? load_once(gate + place) : uint4{0, 0, 0, 0};
    const uint4 other = inside ? load_once(up + place) : uint4{0, 0, 0, 0};
    const Values g = values(one), u = values(other), h = product(g, u);
    const Scale of_h = scale_of_group(h), of_gate = scale_of_group(g), of_up = scale_of_group(u);
    if (!inside) return;
    store_codes(codes + row * pitch + k, h, of_h);
    store_codes(gate_codes + place, one, reciprocal_of(of_gate));
    store_codes(up_codes + place, other, reciprocal_of(of_up));
    const i64 of = k / 128 * M + row;
    if (threadIdx.x % 16 == 0) scale[of] = of_h.value, gate_scale[of] = of_gate.value, up_scale[of] = of_up.value;
}

#endif
