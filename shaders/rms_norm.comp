// Computes  y[i] = s * x[x_offset + i] * gain[i], s = 1 / sqrt(mean(x^2) + eps): RMSNorm (Zhang & Sennrich 2019, eq. 4) of a
//           part of each row of a tensor that has no partial sums.
// Inputs    x f32 from word x_offset of a row on, gain f32 [width] by address; y f32 [width].
// Who       workgroup -> one row (z); lane i takes the values i, i + workgroup size, ...
// Assumes   nothing of width.
// Dispatch  (1, 1, rows)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Input { float x[]; };
layout(set = 0, binding = 1, std430) writeonly buffer Output { float y[]; };
layout(push_constant, std430) uniform Push {
    uvec2 gain;
    uint x_offset;
    uint width;
    uint x_pitch;           // from row to row
    uint y_pitch;
    float eps;
};

#include "reduce.glsl"

void main() {
    const uint first = gl_WorkGroupID.z * x_pitch + x_offset, first_y = gl_WorkGroupID.z * y_pitch;
    float squares = 0.0;
    for (uint i = gl_LocalInvocationIndex; i < width; i += gl_WorkGroupSize.x)
        squares = fma(x[first + i], x[first + i], squares);
    const float scale = 1.0 / sqrt(workgroup_sum(squares) / float(width) + eps);
    for (uint i = gl_LocalInvocationIndex; i < width; i += gl_WorkGroupSize.x)
        y[first_y + i] = x[first + i] * scale * load_float(address_add(gain, i * 4u));
}
