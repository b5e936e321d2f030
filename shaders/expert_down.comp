// Computes  hidden[row] += sum over slots of weight[slot] * (dot(down[slot][row], act[slot]) + bias[slot][row]), for each row
//           of a batch (= if not ADDS); gained[row] = hidden[row] * gain[row]; one partial sum of hidden^2 a workgroup (for the
//           next fused RMSNorm).
//           KEEP: what is read of a slot that has a partner is also stored there, and 1 + the expert's id is logged for each
//           such slot, 0 for the others.
// Inputs    act f32 [n_slots][32 * BLOCK_CHUNKS * n_blocks], routing (ids, weights, addresses, partners), expert spans by
//           address. KEEP: log words [first_filled + 2 * (n_slots * row of the batch + slot) + 1]. Rows lie a pitch behind one
//           another.
// Who       workgroup -> ROWS rows over all slots of one row of the batch (z), if that has experts; its lanes share slots and
//           columns (include/dot.glsl).
// Assumes   rows are 16-byte aligned; workgroup size is a multiple of 8, at least ROWS. Slots are summed in their
//           order in `routing`, their dot products first and then, if BIASED, their biases. If SPARSE, those without an address
//           are the last, and left out; a row without any becomes 0 then if not ADDS.
// Dispatch  (ceil(n_rows / ROWS), 1, rows of the batch)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1u;
layout(constant_id = 2) const uint BIASED = 0u;  // spans have biases
layout(constant_id = 3) const uint LOADED_WORDS = 16u;
layout(constant_id = 4) const uint SPARSE = 0u;  // not all slots have an address
layout(constant_id = 5) const uint ADDS = 1u;    // to what hidden holds; else that is not read

layout(set = 0, binding = 0, std430) readonly buffer Act { Words4Bound act4[]; };
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
    uint act_pitch;         // from row to row of the batch, in vec4
    uint routing_pitch;     // the same in words
    uint hidden_pitch;
    uint partials_pitch;
#ifdef KEEP
    uint first_filled;
#endif
#ifdef CODE_BOOK_WORDS
    uvec2 code_book;        // see include/types/code_book.glsl
#endif
};

#include "reduce.glsl"

uint first_routing;
#include "routing.glsl"

const uint NO_WORD = 0xFFFFFFFFu;

uint first_row;
uint first_act; // in vec4

#define N_DOTS ROWS
#define N_SUMS ROWS
#include "sums.glsl"
#define COLUMNS 1u // other rows of the batch use other experts

// By selection, here and in slot_weight: a branch would wait for what it loads.
WeightRow slot_span(uint slot) {
    const uvec2 routed = routed_address(slot, n_slots);
    return weight_row(is_null(span) ? routed : span, landing_of(slot, n_slots));
}

WeightRow slot_matrix(uint slot) { return row_add(slot_span(slot), down_offset); }

WeightRow dot_row(WeightRow matrix, uint r) { return matrix_row(matrix, first_row + r, n_rows, row_bytes); }

vec4 activation4(uint slot, uint column, uint index4) {
    return bound_vec4(act4[first_act + slot * slot_vec4s + index4]);
}

float slot_weight(uint slot) {
    const float routed = routed_weight(slot, n_slots);
    const float fixed_weight = uintBitsToFloat(routing[first_routing + (weight_word == NO_WORD ? 0u : weight_word)]);
    const float of_fixed = weight_word == NO_WORD ? 1.0 : fixed_weight;
    return is_null(span) ? routed : of_fixed;
}

#include "dot.glsl"

// How many slots have an address: at least the first.
uint n_addressed() {
    uint n = 1u;
    while (n < n_slots && !is_null(routed_address(n, n_slots))) ++n;
    return n;
}

// The weighted sum of the slots' biases.
float biases(uint row) {
    precise float sum = 0.0;
    const uint n = SPARSE != 0u ? n_addressed() : n_slots;
    for (uint s = 0u; s < n; ++s)
        sum = fma(slot_weight(s), span_bias(slot_span(s), down_bias, row), sum);
    return sum;
}

// Returns the row's hidden^2.
float store_row(uint row, uint at, float value, float old_hidden, float row_gain) {
    precise float added = value;
    if (BIASED != 0u) added += biases(row);
    precise float updated = ADDS != 0u ? old_hidden + added : added;
    precise float product = updated * row_gain;
    precise float square = updated * updated;
    hidden[at] = updated;
    gained[at] = product;
    return square;
}

// The sum of no slots.
void clear_rows(uint lane) {
    const uint row = first_row + lane, at = gl_WorkGroupID.z * hidden_pitch + row;
    if (lane < ROWS && row < n_rows) hidden[at] = gained[at] = 0.0;
    if (lane == 0u) partials_out[gl_WorkGroupID.z * partials_pitch + gl_WorkGroupID.x] = 0.0;
}

#ifdef KEEP
void log_filled(uint slot) {
    const uint word = first_filled + 2u * (n_slots * gl_WorkGroupID.z + slot) + 1u;
    filled_log[word] = is_null(landing_of(slot, n_slots)) ? 0u : 1u + routed_id(slot);
}
#endif

void main() {
    const uint lane = gl_LocalInvocationIndex;
    const uint group = gl_WorkGroupID.x;
    first_row = group * ROWS;
    first_act = gl_WorkGroupID.z * act_pitch;
    first_routing = gl_WorkGroupID.z * routing_pitch;
    if (is_null(span) && is_null(routed_address(0u, n_slots))) { // the row is inert, or all its experts are elsewhere
        if (SPARSE != 0u && ADDS == 0u) clear_rows(lane);
        return;
    }
    // The row that this lane stores, if it is one: loaded before the weights, not behind them, but KEEP and SPARSE have no
    // registers to spare.
#define ROW_STORED \
    const uint row = first_row + lane, loaded_row = min(row, n_rows - 1u); \
    const bool stores = lane < ROWS && row < n_rows; \
    const uint at = gl_WorkGroupID.z * hidden_pitch + loaded_row;
#define LOAD_LEFT \
    if (ADDS != 0u) old_hidden = hidden[at]; \
    row_gain = load_float(address_add(gain, loaded_row * 4u));
    float old_hidden, row_gain;
#ifndef KEEP
    ROW_STORED
    if (SPARSE == 0u) { LOAD_LEFT }
#endif
    float dots[N_PRODUCTS], sums[N_SUMS];
    prepare_dots();
    if (SPARSE != 0u) {
        dot_rows(n_addressed(), n_blocks, dots);
    } else {
        dot_rows(n_slots, n_blocks, dots);
    }
#ifdef KEEP
    ROW_STORED
    LOAD_LEFT
#else
    if (SPARSE != 0u) { LOAD_LEFT }
#endif
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) sums[r] = dots[r];
    reduce_sums(sums);
    const float square = workgroup_sum(stores ? store_row(row, at, sum_total(lane), old_hidden, row_gain) : 0.0);
    if (lane == 0u) partials_out[gl_WorkGroupID.z * partials_pitch + group] = square;
#ifdef KEEP
    if (group == 0u) {
        for (uint s = lane; s < n_slots; s += gl_WorkGroupSize.x) log_filled(s);
    }
#endif
}
