// Computes  for each row of a batch, in place, gates = gelu(gates) * inputs, with the tanh form of gelu (Hendrycks & Gimpel 2016).
// Inputs    gates f32 [width]; inputs f32 [width] from word inputs_offset of a row on. Rows lie a pitch behind one another.
// Who       invocation i of a row (z) -> value i.
// Assumes   nothing of width.
// Dispatch  (ceil(width / workgroup size), 1, rows)
#version 460
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) buffer Gates { float gates[]; };
layout(set = 0, binding = 1, std430) readonly buffer Inputs { float inputs[]; };
layout(push_constant, std430) uniform Push {
    uint width;
    uint gates_pitch; // from row to row
    uint inputs_offset;
    uint inputs_pitch;
};

const uint ACTIVATION = 2u;
#include "activation.glsl"

void main() {
    const uint i = gl_GlobalInvocationID.x, row = gl_WorkGroupID.z;
    if (i >= width) return;
    const uint at = row * gates_pitch + i;
    gates[at] = activated(gates[at], inputs[row * inputs_pitch + inputs_offset + i]);
}
