// Computes  for each row of a prompt with latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): the rotary part of every head's q
//           after RoPE, in its place; [c | r], c after RMSNorm, r after RoPE, in the cache, at the row's position in the region of
//           its sequence.
// Inputs    q f32, row t from word q_offset + t*q_pitch on: [N_HEADS][NOPE_DIM + ROPE_DIM]; kv f32, row t from word kv_offset +
//           t*kv_pitch on: [KV_RANK + ROPE_DIM]; both raw, maybe one tensor; params; by address the cache [regions][context]
//           [KV_RANK + ROPE_DIM] (kv_types.glsl), c's gain [KV_RANK], and the RoPE table (cos, sin) [context][ROPE_DIM/2].
// Who       a workgroup takes all heads of a row's q, another its cached row. A lane takes the two dims of q that turn together, or
//           the dims in one word of the cache.
// Assumes   no two rows have the same place in the cache. Rows from n_rows on are left alone.
// Dispatch  (2, rows, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.y
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KV_RANK = 512u;
layout(constant_id = 2) const uint ROPE_DIM = 64u;
layout(constant_id = 3) const uint NOPE_DIM = 128u;
layout(constant_id = 4) const uint N_HEADS = 16u;
layout(constant_id = 5) const uint ROPE_STYLE = 1u; // 0 = halves (neox), 1 = adjacent pairs
layout(constant_id = 6) const uint K_TYPE = 0u; // see kv_types.glsl
layout(constant_id = 7) const uint K_HADAMARD = 1u; // dims of the cached row that are transformed together; 1: none are

layout(set = 0, binding = 0, std430) buffer Q { float q[]; };
layout(set = 0, binding = 2, std430) readonly buffer Kv { float kv[]; };
layout(push_constant, std430) uniform Push {
    uvec2 rows;
    uvec2 rope_table;
    uvec2 gain;
    uint context;
    uint n_regions; // of a cache
    uint q_offset;
    uint q_pitch;
    uint kv_offset;
    uint kv_pitch;
    float eps;
};

#define V_TYPE K_TYPE
#define N_KV_HEADS 1u
#define ROTARY_DIM ROPE_DIM
#define CACHED_DIM (KV_RANK + ROPE_DIM)
#define RING 0u
#include "kv_rows.glsl"
#include "hadamard.glsl"
#include "staged_row.glsl"
#include "attention_rope.glsl"
#include "reduce.glsl"

void turn_queries(uint position) {
    for (uint i = gl_LocalInvocationIndex; i < N_HEADS * ROTARY_PAIRS; i += gl_WorkGroupSize.x) {
        const uint head = i / ROTARY_PAIRS, pair = i % ROTARY_PAIRS;
        const uint dim = ROPE_STYLE == 0u ? pair : 2u * pair, partner = rotation_partner(dim);
        const uint first_word = q_offset + ROW * q_pitch + head * (NOPE_DIM + ROPE_DIM) + NOPE_DIM;
        const float first = q[first_word + dim], second = q[first_word + partner];
        const vec2 cosine_sine = rotation(dim, position);
        q[first_word + dim] = turned(first, second, dim, cosine_sine);
        q[first_word + partner] = turned(second, first, partner, cosine_sine);
    }
}

// 1 / rms of the compressed part. Every invocation must call it.
float compressed_factor(uint first_word) {
    float squares = 0.0;
    for (uint i = gl_LocalInvocationIndex; i < KV_RANK; i += gl_WorkGroupSize.x)
        squares = fma(kv[first_word + i], kv[first_word + i], squares);
    return inverse_rms(workgroup_sum(squares), KV_RANK);
}

float cached_dim(uint first_word, uint d, uint position, float factor) {
    if (d < KV_RANK) return kv[first_word + d] * load_float(address_add(gain, d * 4u)) * factor;
    const uint rotary = d - KV_RANK, partner = KV_RANK + rotation_partner(rotary);
    return turned(kv[first_word + d], kv[first_word + partner], rotary, rotation(rotary, position));
}

void append(uint position) {
    const uint first_word = kv_offset + ROW * kv_pitch;
    const float factor = compressed_factor(first_word);
    const uvec2 region = region_address(K_TYPE, rows, params.rows[ROW].sequence);
    if (has_scales(K_TYPE)) {
        for (uint d = gl_LocalInvocationIndex; d < CACHED_DIM; d += gl_WorkGroupSize.x)
            staged[d] = cached_dim(first_word, d, position, factor);
        append_staged(K_TYPE, K_HADAMARD, region, cached_row(0u, position));
        return;
    }
    for (uint word = gl_LocalInvocationIndex; word < row_words(K_TYPE); word += gl_WorkGroupSize.x) {
        vec4 values = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < 2u; ++i) {
            if (i < word_dims(K_TYPE)) values[i] = cached_dim(first_word, word * word_dims(K_TYPE) + i, position, factor);
        }
        store_row_word(K_TYPE, region, cached_row(0u, position), word, encode(K_TYPE, values, vec4(0.0), 0u).x);
    }
}

void main() {
    if (ROW >= params.n_rows) return;
    const uint position = row_position(ROW);
    if (gl_WorkGroupID.x == 0u) append(position);
    else turn_queries(position);
}
