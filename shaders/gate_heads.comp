// Computes  for each row of a batch, in place, heads = norm(heads) * gate(g) in each head: gate is silu or the logistic function,
//           norm(x) = x / sqrt(mean x^2 + eps) * gain in each head where there is a gain, else x.
// Inputs    heads f32 [N][HEAD_DIM], g f32 [N][HEAD_DIM] from word gates_offset of a row on; params; gain f32 [HEAD_DIM] by
//           address, or null. Rows lie a pitch behind one another; inert rows stay what they are.
// Who       a workgroup takes a head of a row.
// Assumes   nothing of HEAD_DIM.
// Dispatch  (N, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.z
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint IS_SILU = 1u;

layout(set = 0, binding = 0, std430) buffer Heads { float heads[]; };
layout(set = 0, binding = 2, std430) readonly buffer Gates { float gates[]; };
layout(push_constant, std430) uniform Push {
    uvec2 gain;
    uint gates_offset;
    uint heads_pitch; // from row to row
    uint gates_pitch;
    float eps;
};

#include "reduce.glsl"

void main() {
    if (ROW >= params.n_rows) return;
    const uint first = gl_WorkGroupID.x * HEAD_DIM, at = ROW * heads_pitch + first;
    const uint gates_at = ROW * gates_pitch + gates_offset + first;
    float factor = 1.0;
    if (!is_null(gain)) {
        float squares = 0.0;
        for (uint d = gl_LocalInvocationIndex; d < HEAD_DIM; d += gl_WorkGroupSize.x)
            squares = fma(heads[at + d], heads[at + d], squares);
        factor = 1.0 / sqrt(workgroup_sum(squares) / float(HEAD_DIM) + eps);
    }
    for (uint d = gl_LocalInvocationIndex; d < HEAD_DIM; d += gl_WorkGroupSize.x) {
        const float g = gates[gates_at + d], open = 1.0 / (1.0 + exp(-g));
        const float scale = is_null(gain) ? 1.0 : load_float(address_add(gain, d * 4u)) * factor;
        heads[at + d] *= scale * (IS_SILU != 0u ? g * open : open);
    }
}
