// Computes  hidden = scale * E[token] and, if there is a gain, gained = hidden * gain and one partial sum of hidden^2 a workgroup,
//           for each row of a batch.
// Inputs    the tokens of params (clamped to the vocabulary), E by address: [n_vocab] rows of n_blocks quantised blocks.
// Who       invocation -> one chunk of 32 weights of one row of the batch (z).
// Assumes   rows are 16-byte aligned.
// Dispatch  (ceil(n_blocks * BLOCK_CHUNKS / workgroup size), 1, rows)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;

#define PARAMS_BINDING 0
#define ROW gl_WorkGroupID.z
#include "params.glsl"
layout(set = 0, binding = 1, std430) writeonly buffer Hidden { vec4 hidden4[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Gained { vec4 gained4[]; };
layout(set = 0, binding = 3, std430) writeonly buffer PartialsOut { float partials_out[]; };

layout(push_constant, std430) uniform Push {
    uvec2 embeddings;
    uvec2 gain;             // f32 [width]; the gain of the first norm; null: nothing is left for one
    uint n_vocab;
    uint row_bytes;
    uint n_blocks;
    uint hidden_pitch;      // from row to row of hidden and gained, in words
    uint partials_pitch;
    float scale;
#ifdef CODE_BOOK_WORDS
    uvec2 code_book;        // see include/types/code_book.glsl
#endif
};

#include "reduce.glsl"

#include "weights.glsl"

float store_group(uint first, vec4 q[8], uint q_first, float of_q, float minimum) {
    const uint row = ROW * (hidden_pitch / 4u);
    float square = 0.0;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const vec4 value = (of_q * q[q_first + i] - minimum) * scale;
        hidden4[row + first + i] = value;
        if (!is_null(gain)) gained4[row + first + i] = value * load_vec4(address_add(gain, (first + i) * 16u));
        square += dot(value, value);
    }
    return square;
}

void main() {
    if (ROW >= params.n_rows) return;
    const uint block = gl_GlobalInvocationID.x / BLOCK_CHUNKS;
    const uint t = gl_GlobalInvocationID.x % BLOCK_CHUNKS;
    float square = 0.0;
    if (block < n_blocks) {
        WeightChunk chunk;
        vec4 q[8];
        vec4 of_groups; // of each its scale and its minimum
        load_chunk(matrix_row(to_address(embeddings), params.rows[ROW].token, n_vocab, row_bytes), n_blocks, block, t, chunk);
        unpack_chunk(chunk, block, t, q, of_groups);
#ifdef Q_UNIT
        [[unroll]] for (uint i = 0u; i < 8u; ++i) q[i] *= Q_UNIT;
#endif
        const uint first = chunk_x(block, t);
        square = store_group(first, q, 0u, of_groups.x, of_groups.y);
        square += store_group(first + GROUP_B_OFFSET, q, 4u, of_groups.z, of_groups.w);
    }
    if (is_null(gain)) return;
    square = workgroup_sum(square);
    if (gl_LocalInvocationIndex == 0u) partials_out[ROW * partials_pitch + gl_WorkGroupID.x] = square;
}
