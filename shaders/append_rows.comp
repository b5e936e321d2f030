// Computes  for each row of a prompt: q after norm and RoPE, in its place; k after norm and RoPE, and v, after its norm if
//           VALUE_NORM, in the caches, at the row's position in the region of its sequence.
// Inputs    qkv f32, row r from word r*qkv_pitch on: [N_HEADS*HEAD_DIM | N_KV_HEADS*HEAD_DIM | the same], raw; params; by
//           address the K and V caches [regions][N_KV_HEADS][PLACES][HEAD_DIM] (kv_types.glsl), norm gains, and the RoPE table (cos,
//           sin) [context][ROTARY_DIM/2].
// Who       a workgroup takes a head of a row, or where the norm is over the full width all of q, of k or of v. A lane takes the
//           two dims of q that turn together, or the dims in one word of a cache.
// Assumes   no two rows have the same place in the caches; values have no norm where that of keys is over the full width. Rows from n_rows on are left alone.
// Dispatch  (N_HEADS + 2 N_KV_HEADS, or 3 where the norm is over the full width, rows, 1); (N_HEADS, rows, 1) where rows bring
//           no k and v.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.y
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint N_HEADS = 32u;
layout(constant_id = 3) const uint N_KV_HEADS = 4u;
layout(constant_id = 4) const uint ROTARY_DIM = 128u;
layout(constant_id = 5) const uint ROPE_STYLE = 0u; // 0 = halves (neox), 1 = adjacent pairs
layout(constant_id = 6) const uint NORM_MODE = 1u;  // 0 = none, 1 = per head, 2 = full width, 3 = per head, gains behind RoPE
layout(constant_id = 7) const uint K_TYPE = 0u; // see kv_types.glsl
layout(constant_id = 8) const uint V_TYPE = 0u;
layout(constant_id = 9) const uint VALUE_NORM = 0u; // of v of each kv head, without a gain
layout(constant_id = 10) const uint RING = 0u; // see kv_types.glsl
layout(constant_id = 11) const uint K_HADAMARD = 1u; // dims of k and of v that are transformed together; 1: none are
layout(constant_id = 12) const uint V_HADAMARD = 1u;

layout(set = 0, binding = 0, std430) buffer Qkv { float qkv[]; };
layout(push_constant, std430) uniform Push {
    uvec2 k_cache;
    uvec2 v_cache;
    uvec2 q_gain;
    uvec2 k_gain;
    uvec2 rope_table;
    uint context;
    uint n_regions; // of a cache
    uint qkv_pitch;
    float eps;
};

#define CACHED_DIM HEAD_DIM
#include "kv_rows.glsl"
#include "hadamard.glsl"
#include "staged_row.glsl"
#include "attention_rope.glsl"
#include "reduce.glsl"

const bool TAKES_ALL = NORM_MODE == 2u;
const bool GAINS_LAST = NORM_MODE == 3u;

// Heads of q, k or v that a workgroup takes.
struct Span {
    uint first_word; // of qkv
    uint first_head; // in its part
    uint n_heads;
    bool is_query;
    bool is_value;
};

Span find_span() {
    const uint group = gl_WorkGroupID.x;
    const uint n_query_spans = TAKES_ALL ? 1u : N_HEADS, n_kv_spans = TAKES_ALL ? 1u : N_KV_HEADS;
    Span span;
    span.is_query = group < n_query_spans;
    span.is_value = group >= n_query_spans + n_kv_spans;
    span.n_heads = !TAKES_ALL ? 1u : span.is_query ? N_HEADS : N_KV_HEADS;
    span.first_head = span.is_query ? group : span.is_value ? group - n_query_spans - n_kv_spans : group - n_query_spans;
    const uint heads_before = (span.is_query ? 0u : N_HEADS) + (span.is_value ? N_KV_HEADS : 0u);
    span.first_word = ROW * qkv_pitch + (heads_before + span.first_head) * HEAD_DIM;
    return span;
}

// 1 / rms of the span. Every invocation must call it.
float span_factor(Span span) {
    if (span.is_value ? VALUE_NORM == 0u : NORM_MODE == 0u) return 1.0;
    const uint width = span.n_heads * HEAD_DIM;
    float squares = 0.0;
    for (uint i = gl_LocalInvocationIndex; i < width; i += gl_WorkGroupSize.x)
        squares = fma(qkv[span.first_word + i], qkv[span.first_word + i], squares);
    return inverse_rms(workgroup_sum(squares), width);
}

// Dim `d` of a head of the span, with its gain.
float gained(Span span, uint head, uint d) {
    const uint i = head * HEAD_DIM + d;
    const float value = qkv[span.first_word + i];
    if (NORM_MODE == 0u || GAINS_LAST || span.is_value) return value;
    return value * load_float(address_add(span.is_query ? q_gain : k_gain, (TAKES_ALL ? i : d) * 4u));
}

// The gain of dim `d` of q or k behind the rotation.
float turned_gain(Span span, uint d) {
    return GAINS_LAST ? load_float(address_add(span.is_query ? q_gain : k_gain, d * 4u)) : 1.0;
}

// The two dims of q that turn together; those that do not turn are taken in pairs too.
uvec2 pair_dims(uint pair) {
    return ROPE_STYLE == 0u && pair < ROTARY_PAIRS ? uvec2(pair, pair + ROTARY_PAIRS) : uvec2(2u * pair, 2u * pair + 1u);
}

void turn_queries(Span span, uint position, float factor) {
    const uint HEAD_PAIRS = HEAD_DIM / 2u;
    for (uint i = gl_LocalInvocationIndex; i < span.n_heads * HEAD_PAIRS; i += gl_WorkGroupSize.x) {
        const uint head = i / HEAD_PAIRS, pair = i % HEAD_PAIRS;
        const uvec2 dims = pair_dims(pair);
        const float first = gained(span, head, dims.x), second = gained(span, head, dims.y);
        vec2 values = vec2(first, second);
        if (pair < ROTARY_PAIRS) {
            const vec2 cosine_sine = rotation(dims.x, position);
            values = vec2(turned(first, second, dims.x, cosine_sine), turned(second, first, dims.y, cosine_sine));
        }
        qkv[span.first_word + head * HEAD_DIM + dims.x] = values.x * factor * turned_gain(span, dims.x);
        qkv[span.first_word + head * HEAD_DIM + dims.y] = values.y * factor * turned_gain(span, dims.y);
    }
}

float cached_dim(Span span, uint head, uint d, uint position) {
    const float value = gained(span, head, d);
    if (span.is_value) return value;
    if (d >= ROTARY_DIM) return value * turned_gain(span, d);
    const float partner = gained(span, head, rotation_partner(d));
    return turned(value, partner, d, rotation(d, position)) * turned_gain(span, d);
}

void append_as(uint type, uint n_transformed, Span span, uint position, float factor) {
    const uvec2 region = region_address(type, span.is_value ? v_cache : k_cache, params.rows[ROW].sequence);
    if (has_scales(type)) {
        for (uint head = 0u; head < span.n_heads; ++head) {
            for (uint d = gl_LocalInvocationIndex; d < HEAD_DIM; d += gl_WorkGroupSize.x)
                staged[d] = cached_dim(span, head, d, position) * factor;
            append_staged(type, n_transformed, region, cached_row(span.first_head + head, position));
        }
        return;
    }
    const uint head_words = row_words(type);
    for (uint i = gl_LocalInvocationIndex; i < span.n_heads * head_words; i += gl_WorkGroupSize.x) {
        const uint head = i / head_words, word = i % head_words;
        vec4 values = vec4(0.0);
        [[unroll]] for (uint j = 0u; j < 2u; ++j) {
            if (j < word_dims(type)) values[j] = cached_dim(span, head, word * word_dims(type) + j, position) * factor;
        }
        store_row_word(type, region, cached_row(span.first_head + head, position), word, encode(type, values, vec4(0.0), 0u).x);
    }
}

void main() {
    if (ROW >= params.n_rows) return;
    const Span span = find_span();
    const uint position = row_position(ROW);
    const float factor = span_factor(span);
    if (span.is_query) turn_queries(span, position, factor);
    else if (K_TYPE == V_TYPE || !span.is_value) append_as(K_TYPE, K_HADAMARD, span, position, factor);
    else append_as(V_TYPE, V_HADAMARD, span, position, factor);
}
