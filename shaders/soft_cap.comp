// Computes  logits = cap * tanh(logits / cap) for each row of a batch, in place (Gemma 2, arXiv:2408.00118, section 2).
// Inputs    logits f32 [n_vocab]; rows lie a pitch behind one another.
// Who       invocation i of a row (z) -> logits i, i + invocations of the row, ...
// Assumes   cap > 0. NaN stays what it is.
// Dispatch  (number of workgroups, 1, rows)
#version 460
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) buffer Logits { float logits[]; };
layout(push_constant, std430) uniform Push {
    uint n_vocab;
    uint logits_pitch; // from row to row
    float cap;
};

#include "float_order.glsl"

const float SERIES_END = 0.625;

// tanh(x), small as it may be: by a series where 1 - e^(-2x) would lose digits (Cephes, tanhf), else by that; nothing overflows.
float precise_tanh(float x) {
    const float size = min(abs(x), 10.0), square = size * size, fading = exp(-2.0 * size); // tanh(10) is 1
    precise float series = -5.70498872745e-3;
    series = series * square + 2.06390887954e-2;
    series = series * square - 5.37397155531e-2;
    series = series * square + 1.33314422036e-1;
    series = series * square - 3.33332819422e-1;
    series = series * square * size + size;
    precise float result = size < SERIES_END ? series : (1.0 - fading) / (1.0 + fading);
    return x < 0.0 ? -result : result;
}

void main() {
    const uint first = gl_WorkGroupID.z * logits_pitch;
    for (uint i = gl_GlobalInvocationID.x; i < n_vocab; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
        const float logit = logits[first + i];
        if (!is_nan_bits(floatBitsToUint(logit))) logits[first + i] = cap * precise_tanh(logit / cap);
    }
}
