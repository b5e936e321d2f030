// Computes  y[i] = x[params.rows[first_picked + i].picked]: rows of a batch that want logits, one behind the other.
// Inputs    x f32 [rows][row_vec4s] as vec4, params; y the same. Rows lie a pitch behind one another, in vec4.
// Who       workgroup -> one row of y (z), its vec4s in runs of the workgroup size (x), one a lane.
// Assumes   rows are whole vec4s. Behind the last that is picked, y has some row of x.
// Dispatch  (ceil(row_vec4s / workgroup size), 1, rows of y)
#version 460
#extension GL_GOOGLE_include_directive : require
#define PARAMS_BINDING 1
#include "params.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Input { vec4 x[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Output { vec4 y[]; };
layout(push_constant, std430) uniform Push {
    uint row_vec4s;
    uint x_pitch;
    uint y_pitch;
};

void main() {
    const uint i = gl_GlobalInvocationID.x, row = gl_WorkGroupID.z;
    const uint at = min(params.first_picked + row, params.n_rows - 1u);
    const uint picked = min(params.rows[at].picked, params.n_rows - 1u);
    if (i < row_vec4s) y[row * y_pitch + i] = x[picked * x_pitch + i];
}
