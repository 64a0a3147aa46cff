// h = act(gate) * up for few tokens, act SiLU or GELU (tanh): (gate | up) 16 bit [M, 2 K] -> h 16 bit [M, K].
//
// Rounded to 16 bit after the activation, as Transformers' MLP is. A thread takes 8 values. Compiled per variant with:
// NAME, X_BF16, THREADS, GELU. Needs K % 8 == 0; everything contiguous.
#include "rows.cuh"

#define LOG2_E 1.4426950408889634f

DEVICE float activation(float x) {
    const float cubic = 0.7978845608028654f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
    // x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
    const float inner = GELU ? 2.0f * cubic : x;
    return x * (1.0f / (1.0f + exp2_approximately(-LOG2_E * inner)));
}

KERNEL(THREADS, 1) NAME(const u16* gate_up, u16* h, int K) {
    const int k = (int(blockIdx.x) * THREADS + threadIdx.x) * 8;
    const i64 row = blockIdx.y;
    wait_for_previous_kernel();
    if (k >= K) return;
    const Values gate = values(load_once(gate_up + row * 2 * K + k)), up = values(load_once(gate_up + (row * 2 + 1) * K + k));
    Values active;
#pragma unroll
    for (int i = 0; i < 8; ++i) active.at[i] = activation(gate.at[i]);
    *reinterpret_cast<uint4*>(h + row * K + k) = rounded(times(values(rounded(active)), up));
}
