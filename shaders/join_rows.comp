// Computes  hidden += given (= if not ADDS), for each row of a batch; if there is a gain then gained = hidden * gain and one
//           partial sum of hidden^2 a workgroup (for the next fused RMSNorm).
// Inputs    given, hidden f32 [4 * row_vec4s]; gain f32 [4 * row_vec4s] by address, or null; params. Inert rows stay what they
//           are. Rows lie a pitch behind one another.
// Who       workgroup -> VEC4S_PER_LANE * size vec4s of one row of the batch (z); a lane takes each size-th of them.
// Assumes   nothing else.
// Dispatch  (ceil(row_vec4s / (VEC4S_PER_LANE * workgroup size)), 1, rows)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 0
#define ROW gl_WorkGroupID.z
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ADDS = 1u; // to what hidden holds; else that is not read

layout(set = 0, binding = 1, std430) readonly buffer Given { vec4 given4[]; };
layout(set = 0, binding = 2, std430) buffer Hidden { vec4 hidden4[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Gained { vec4 gained4[]; };
layout(set = 0, binding = 4, std430) writeonly buffer PartialsOut { float partials_out[]; };

layout(push_constant, std430) uniform Push {
    uvec2 gain;
    uint row_vec4s;
    uint given_pitch;       // from row to row of the batch, in vec4
    uint hidden_pitch;      // the same of hidden and gained, in words
    uint partials_pitch;
};

#include "reduce.glsl"

const uint VEC4S_PER_LANE = 8u;

// Returns the sum of squares.
float join(uint i) {
    const uint at = ROW * (hidden_pitch / 4u) + i;
    precise vec4 updated = given4[ROW * given_pitch + i];
    if (ADDS != 0u) updated = hidden4[at] + updated;
    hidden4[at] = updated;
    if (is_null(gain)) return 0.0;
    precise vec4 product = updated * load_vec4(address_add(gain, i * 16u));
    gained4[at] = product;
    return dot(updated, updated);
}

void main() {
    if (ROW >= params.n_rows) return;
    float square = 0.0;
    for (uint i = 0u; i < VEC4S_PER_LANE; ++i) {
        const uint at = (gl_WorkGroupID.x * VEC4S_PER_LANE + i) * gl_WorkGroupSize.x + gl_LocalInvocationIndex;
        if (at < row_vec4s) square += join(at);
    }
    if (is_null(gain)) return;
    square = workgroup_sum(square);
    if (gl_LocalInvocationIndex == 0u) partials_out[ROW * partials_pitch + gl_WorkGroupID.x] = square;
}
