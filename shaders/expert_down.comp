// Computes  hidden[row] += sum over slots of weight[slot] * (dot(down[slot][row], act[slot]) + bias[slot][row]);
//           gained[row] = hidden[row] * gain[row]; one partial sum of hidden^2 a workgroup (for the next fused RMSNorm).
//           KEEP: what is read of a slot that has a partner is also stored there, and 1 + the expert's id is logged for each
//           such slot, 0 for the others.
// Inputs    act f32 [n_slots][32 * BLOCK_CHUNKS * n_blocks], routing (ids, weights, addresses, partners), expert spans by
//           address. KEEP: log words [first_filled + 2 * slot + 1].
// Who       workgroup -> ROWS rows over all slots; its lanes share slots and columns (include/dot.glsl).
// Assumes   rows are 16-byte aligned; workgroup size is a multiple of 8. Slots are summed in their order in `routing`,
//           their dot products first and then, if BIASED, their biases.
// Dispatch  (ceil(n_rows / ROWS), 1, 1)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1u;
layout(constant_id = 2) const uint BIASED = 0u;  // spans have biases

layout(set = 0, binding = 0, std430) readonly buffer Act { vec4 act4[]; };
layout(set = 0, binding = 1, std430) readonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 2, std430) buffer Hidden { float hidden[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Gained { float gained[]; };
layout(set = 0, binding = 4, std430) writeonly buffer PartialsOut { float partials_out[]; };
#ifdef KEEP
layout(set = 0, binding = 5, std430) writeonly buffer Log { uint filled_log[]; };
#endif

layout(push_constant, std430) uniform Push {
    uvec2 span;             // a fixed expert (dense feed-forward, shared expert); null: the routed ones
    uvec2 gain;             // f32 [n_rows]
    uint down_offset;       // bytes from the start of a span
    uint down_bias;         // the same of f32 [n_rows], if BIASED
    uint weight_word;       // of `routing`, a fixed expert's weight; NO_WORD: 1
    uint n_rows;
    uint row_bytes;
    uint n_blocks;
    uint n_slots;
    uint slot_vec4s;        // vec4s of act in a slot
#ifdef KEEP
    uint first_filled;
#endif
};

#include "reduce.glsl"
#include "routing.glsl"

const uint NO_WORD = 0xFFFFFFFFu;

uint first_row;

#define N_DOTS ROWS

uvec2 slot_span(uint slot) { return is_null(span) ? routed_address(slot, n_slots) : span; }

WeightRow dot_row(uint r, uint slot) {
    return span_row(slot_span(slot), landing_of(slot, n_slots), down_offset, first_row + r, n_rows, row_bytes);
}

vec4 activation4(uint slot, uint index4) { return act4[slot * slot_vec4s + index4]; }
float slot_weight(uint slot) {
    if (is_null(span)) return routed_weight(slot, n_slots);
    return weight_word == NO_WORD ? 1.0 : uintBitsToFloat(routing[weight_word]);
}

#include "dot.glsl"

float hidden_square = 0.0;

// The weighted sum of the slots' biases.
float biases(uint row) {
    precise float sum = 0.0;
    for (uint s = 0u; s < n_slots; ++s)
        sum = fma(slot_weight(s), span_bias(slot_span(s), landing_of(s, n_slots), down_bias, row), sum);
    return sum;
}

void store_row(uint row, float value) {
    precise float added = value;
    if (BIASED != 0u) added += biases(row);
    precise float updated = hidden[row] + added;
    precise float product = updated * load_float(address_add(gain, row * 4u));
    precise float squares = hidden_square + updated * updated;
    hidden[row] = updated;
    gained[row] = product;
    hidden_square = squares;
}

#ifdef KEEP
void log_filled(uint slot) {
    filled_log[first_filled + 2u * slot + 1u] = is_null(landing_of(slot, n_slots)) ? 0u : 1u + routing[slot];
}
#endif

void main() {
    const uint lane = gl_LocalInvocationIndex;
    const uint group = gl_WorkGroupID.x;
    first_row = group * ROWS;
    dot_rows(n_slots, n_blocks);
    for (uint r = lane; r < ROWS; r += gl_WorkGroupSize.x) {
        if (first_row + r < n_rows) store_row(first_row + r, dot_total(r));
    }
    const float square = workgroup_sum(hidden_square);
    if (lane == 0u) partials_out[group] = square;
#ifdef KEEP
    if (group == 0u) {
        for (uint s = lane; s < n_slots; s += gl_WorkGroupSize.x) log_filled(s);
    }
#endif
}
