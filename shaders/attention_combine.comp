// Computes  out_h[d] = sum over splits s of e^(max_s - max) * sum_s[d] / sum over s of e^(max_s - max) * total_s.
// Inputs    partials f32 [N_HEADS][N_SPLITS][HEAD_DIM + 2] (sums, maximum, total of weights) of attention.comp; params. Output:
//           out f32 [N_HEADS * HEAD_DIM].
// Who       one workgroup per head, one dim per invocation in turn; the splits' factors are computed once into shared memory.
// Assumes   at most 128 splits. Splits beyond the position hold old data and are not read.
// Dispatch  (N_HEADS, 1, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#define PARAMS_BINDING 1
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint N_SPLITS = 1u;

layout(set = 0, binding = 0, std430) readonly buffer Partials { float partials[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Out { float out_heads[]; };
layout(push_constant, std430) uniform Push { uint context; };

#include "attention_split.glsl"

shared float factor[128];

void main() {
    const uint position = current_position(context);
    const uint n_used_splits = position / split_positions(position) + 1u;
    const uint split_words = HEAD_DIM + 2u;
    const uint first = gl_WorkGroupID.x * N_SPLITS * split_words;

    float top = partials[first + HEAD_DIM];
    for (uint s = 1u; s < n_used_splits; ++s) top = max(top, partials[first + s * split_words + HEAD_DIM]);
    for (uint s = gl_LocalInvocationIndex; s < n_used_splits; s += gl_WorkGroupSize.x) {
        factor[s] = exp(partials[first + s * split_words + HEAD_DIM] - top);
    }
    barrier();
    float total = 0.0;
    for (uint s = 0u; s < n_used_splits; ++s) total += factor[s] * partials[first + s * split_words + HEAD_DIM + 1u];
    const float inverse_total = 1.0 / total;

    for (uint d = gl_LocalInvocationIndex; d < HEAD_DIM; d += gl_WorkGroupSize.x) {
        float sum = 0.0;
        for (uint s = 0u; s < n_used_splits; ++s) sum += factor[s] * partials[first + s * split_words + d];
        out_heads[gl_WorkGroupID.x * HEAD_DIM + d] = sum * inverse_total;
    }
}
