// Computes  hidden = E[token], gained = hidden * gain, one partial sum of hidden^2 a workgroup.
// Inputs    the token of params (clamped to the vocabulary), E by address: [n_vocab] rows of n_blocks quantised blocks.
// Who       invocation -> one chunk of 32 weights.
// Assumes   rows are 16-byte aligned.
// Dispatch  (ceil(n_blocks * BLOCK_CHUNKS / workgroup size), 1, 1)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;

#define PARAMS_BINDING 0
#include "params.glsl"
layout(set = 0, binding = 1, std430) writeonly buffer Hidden { vec4 hidden4[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Gained { vec4 gained4[]; };
layout(set = 0, binding = 3, std430) writeonly buffer PartialsOut { float partials_out[]; };

layout(push_constant, std430) uniform Push {
    uvec2 embeddings;
    uvec2 gain;             // f32 [width]; the gain of the first norm
    uint n_vocab;
    uint row_bytes;
    uint n_blocks;
};

#include "reduce.glsl"

WeightRow row_address;
uint block_index;

uvec4 staged_word4(uint r, uint i);
#include "weights.glsl"

uvec4 staged_word4(uint r, uint i) { return load_staged(row_address, n_blocks, block_index, i); }

float store_group(uint first, vec4 q[8], uint q_first, float scale, float minimum) {
    float square = 0.0;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const vec4 value = scale * q[q_first + i] - minimum;
        hidden4[first + i] = value;
        gained4[first + i] = value * load_vec4(address_add(gain, (first + i) * 16u));
        square += dot(value, value);
    }
    return square;
}

void main() {
    const uint chunk = gl_GlobalInvocationID.x;
    float square = 0.0;
    if (chunk < n_blocks * BLOCK_CHUNKS) {
        vec4 q[8];
        vec4 scale;
        const uint t = chunk % BLOCK_CHUNKS;
        block_index = chunk / BLOCK_CHUNKS;
        row_address = address_add_product(embeddings, min(params.rows[ROW].token, n_vocab - 1u), row_bytes);
        unpack_chunk(row_address, n_blocks, block_index, t, 0u, q, scale);
#ifdef Q_UNIT
        [[unroll]] for (uint i = 0u; i < 8u; ++i) q[i] *= Q_UNIT;
#endif
        const uint first = chunk_x(block_index, t);
        square = store_group(first, q, 0u, scale.x, scale.y) + store_group(first + GROUP_B_OFFSET, q, 4u, scale.z, scale.w);
    }
    square = workgroup_sum(square);
    if (gl_LocalInvocationIndex == 0u) partials_out[gl_WorkGroupID.x] = square;
}
