// Computes  for each row of a batch, in place, values = H values / sqrt(BLOCK) in each block of BLOCK dims of its heads; H is the
//           Walsh-Hadamard matrix, and this its own inverse.
// Inputs    values f32, head h of row r from word offset + r*pitch + h*stride on: [head_dims]; params. Inert rows stay what they are.
// Who       a lane takes a block.
// Assumes   BLOCK, a power of two from 8 to 32, divides head_dims.
// Dispatch  (workgroups whose lanes are the blocks of a row or more, rows, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.y
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint BLOCK = 32u;

layout(set = 0, binding = 0, std430) buffer Values { float values[]; };
layout(push_constant, std430) uniform Push {
    uint offset; // words
    uint pitch;  // from row to row
    uint stride; // from head to head
    uint head_dims;
    uint n_heads;
};

const uint MOST = 32u; // values of a block

void main() {
    if (ROW >= params.n_rows) return;
    const uint first = gl_GlobalInvocationID.x * BLOCK, head = first / head_dims;
    if (head >= n_heads) return;
    const uint at = offset + ROW * pitch + head * stride + first % head_dims;
    float block[MOST];
    [[unroll]] for (uint i = 0u; i < MOST; ++i) block[i] = i < BLOCK ? values[at + i] : 0.0;
    [[unroll]] for (uint step = 1u; step < MOST; step *= 2u) {
        [[unroll]] for (uint i = 0u; i < MOST; ++i) {
            if (step < BLOCK && (i & step) == 0u) {
                const float one = block[i], other = block[i + step];
                block[i] = one + other;
                block[i + step] = one - other;
            }
        }
    }
    const float factor = BLOCK == 32u ? 0.17677669529663688 : BLOCK == 16u ? 0.25 : 0.35355339059327376;
    [[unroll]] for (uint i = 0u; i < MOST; ++i) {
        if (i < BLOCK) values[at + i] = block[i] * factor;
    }
}
