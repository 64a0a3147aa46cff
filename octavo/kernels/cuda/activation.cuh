// SiLU and GELU (tanh) with their slopes, by eight values. A source that includes this defines GELU and what rows.cuh needs.
#pragma once
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

// Of product(gate, up), whose gradient is dh.
DEVICE void gradients(const Values& dh, const Values& gate, const Values& up, Values& of_gate, Values& of_up) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const Activation a = activation(gate.at[i]);
        of_gate.at[i] = dh.at[i] * up.at[i] * a.slope;
        of_up.at[i] = dh.at[i] * a.value;
    }
}
