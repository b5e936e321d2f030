// Computes  for each row of a batch the n_used experts of largest logit (lower id wins ties) and their weights: softmax over all
//           experts or sigmoid, optionally divided by the sum of the chosen, times scale, times the expert's own scale where there
//           are such. With a selection bias the largest score + bias are chosen instead, a score being that softmax or sigmoid;
//           weights do not see the bias (DeepSeek-V3, arXiv:2412.19437, eq. 16). With N_GROUPS > 1 all chosen are of the
//           n_groups_used best groups of experts (lower wins ties): those with the largest best logit or score, for sigmoid with
//           the largest sum of two scores. A shared expert's weight is the sigmoid of the last logit. Of the landing row's chosen
//           experts that are at home (AT_HOME in their entry) the j-th in slot order gets the layer's j-th landing place, if that
//           is not null: as the place to store into while its home is read, or with FLAG_GATHER as the place to be read, its home
//           being what is copied there. That other address is the slot's partner, null where there is none.
// Inputs    logits f32 [N_EXPERTS (+ 1 gate)]; selection_bias and output_scales f32 [N_EXPERTS] by address; params; the expert
//           table by address, uvec2 entries [n_layers][N_EXPERTS] and landing places, this layer's from entry first_landing on.
//           Outputs: routing words [n_used ids | n_used weights | n_used addresses of 2 words | n_used partners of 2 words (|
//           weight of the shared expert)] a row; log words [first_id + row * n_used ...] = the chosen ids. Rows lie a pitch behind
//           one another. Of an inert row addresses and partners are null, and the log is left alone.
// Who       workgroup -> one row of the batch (z); each lane keeps the best of its experts lane, lane + size, ..., and looks at
//           its groups lane, lane + size, ...; n_used rounds of a workgroup argmax; then lane s writes slot s.
// Assumes   n_used <= N_EXPERTS, n_used <= MAX_USED; N_GROUPS divides N_EXPERTS, and the groups used hold n_used. NaN counts
//           as -inf; ids are valid and distinct whatever the logits are.
// Dispatch  (1, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.z
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint N_EXPERTS = 128u;
layout(constant_id = 2) const uint N_GROUPS = 1u;

layout(set = 0, binding = 0, std430) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Log { uint routing_log[]; };
layout(push_constant, std430) uniform Push {
    uvec2 selection_bias;   // null: none
    uvec2 output_scales;    // of what experts give; null: none
    uint layer;
    uint n_used;
    uint flags;
    float scale;
    uint first_landing;     // entry of the table
    uint n_landing;
    uint n_groups_used;
    uint first_id;          // word of the log
    uint logits_pitch;      // from row to row of the batch
    uint routing_pitch;
};

const uint FLAG_RENORMALISE = 1u, FLAG_SIGMOID = 2u, FLAG_SHARED_GATE = 4u, FLAG_GATHER = 8u;
const uint AT_HOME = 1u;   // in the low word of an entry
const uint MAX_USED = 32u;

#include "reduce.glsl"
#include "float_order.glsl"
#include "argmax.glsl"

shared uint keys[N_EXPERTS];  // what experts are chosen by; KEY_NONE: not any more
shared uint group_keys[N_GROUPS];
shared uint chosen_ids[MAX_USED];
shared float chosen_values[MAX_USED];
shared uvec2 chosen_entries[MAX_USED];

bool has(uint flag) { return (flags & flag) != 0u; }

// Whether scores decide: their order is that of the logits until something is added to them.
bool by_score() { return !is_null(selection_bias) || (has(FLAG_SIGMOID) && N_GROUPS > 1u); }

float logit(uint e) { return logits[ROW * logits_pitch + e]; }

float finite_logit(uint e) { return finite_key_value(order_key(logit(e))); }

float sigmoid(float value) { return 1.0 / (1.0 + exp(clamp(-value, -80.0, 80.0))); }

// The weight before normalisation; for softmax relative to the largest logit. Far differences are cut where exp is 0 anyway.
float gate(float value, float top) { return has(FLAG_SIGMOID) ? sigmoid(value) : exp(max(value - top, -120.0)); }

// (key, id) of the best expert of this lane that has not been chosen.
uvec2 lane_best() {
    uvec2 best = uvec2(KEY_NONE, 0xFFFFFFFFu);
    for (uint e = gl_LocalInvocationIndex; e < N_EXPERTS; e += gl_WorkGroupSize.x) {
        if (keys[e] > best.x) best = uvec2(keys[e], e);
    }
    return best;
}

// The largest logit of all experts, and the sum of the softmax numerators. Keys are those of logits.
vec2 softmax_total() {
    float top = -3.4028234e38, sum = 0.0;
    for (uint e = gl_LocalInvocationIndex; e < N_EXPERTS; e += gl_WorkGroupSize.x) top = max(top, finite_key_value(keys[e]));
    top = workgroup_max(top);
    for (uint e = gl_LocalInvocationIndex; e < N_EXPERTS; e += gl_WorkGroupSize.x) sum += gate(finite_key_value(keys[e]), top);
    return vec2(top, workgroup_sum(sum));
}

// Replaces the keys of logits by those of scores plus bias.
void key_scores(vec2 total) {
    for (uint e = gl_LocalInvocationIndex; e < N_EXPERTS; e += gl_WorkGroupSize.x) {
        const float bias = is_null(selection_bias) ? 0.0 : load_float(address_add(selection_bias, e * 4u));
        const float score = gate(finite_key_value(keys[e]), total.x) / total.y;
        keys[e] = order_key(score + bias);
    }
    barrier();
}

uint group_key(uint first, uint n_members) {
    uint best = KEY_NONE, second = KEY_NONE;
    for (uint e = first; e < first + n_members; ++e) {
        second = max(second, min(best, keys[e]));
        best = max(best, keys[e]);
    }
    if (!has(FLAG_SIGMOID) || second == KEY_NONE) return best;
    return order_key(finite_key_value(best) + finite_key_value(second));
}

// Takes the experts of all but the best groups out of the choice.
void choose_groups() {
    const uint n_members = N_EXPERTS / N_GROUPS;
    for (uint g = gl_LocalInvocationIndex; g < N_GROUPS; g += gl_WorkGroupSize.x)
        group_keys[g] = group_key(g * n_members, n_members);
    barrier();
    for (uint g = gl_LocalInvocationIndex; g < N_GROUPS; g += gl_WorkGroupSize.x) {
        uint rank = 0u;
        for (uint i = 0u; i < N_GROUPS; ++i) rank += argmax_beats(group_keys[i], i, group_keys[g], g) ? 1u : 0u;
        if (rank < n_groups_used) continue;
        for (uint e = g * n_members; e < (g + 1u) * n_members; ++e) keys[e] = KEY_NONE;
    }
    barrier();
}

void choose() {
    uvec2 mine = lane_best();
    [[dont_unroll]] for (uint round = 0u; round < n_used; ++round) {
        const uvec2 winner = workgroup_argmax(mine.x, mine.y);
        const uint id = min(winner.y, N_EXPERTS - 1u);
        if (gl_LocalInvocationIndex == 0u) {
            chosen_ids[round] = id;
            chosen_values[round] = finite_key_value(winner.x);
        }
        if (id % gl_WorkGroupSize.x == gl_LocalInvocationIndex) {
            keys[id] = KEY_NONE;
            mine = lane_best();
        }
    }
    barrier();
}

// The same of the chosen experts alone.
vec2 chosen_total() {
    float top = chosen_values[0], sum = 0.0;
    [[dont_unroll]] for (uint s = 1u; s < n_used; ++s) top = max(top, chosen_values[s]);
    [[dont_unroll]] for (uint s = 0u; s < n_used; ++s) sum += gate(chosen_values[s], top);
    return vec2(top, sum);
}

uvec2 table_entry(uint index) { return AddressEntry(address_add_product(params.expert_table, index, 8u)).address; }

bool is_at_home(uint slot) { return (chosen_entries[slot].x & AT_HOME) != 0u; }

// Where the expert of a slot may land: null if it has a place of its own, if those before it took all places, and in all rows
// but one: two rows may use one expert, and both would store it.
uvec2 landing_place(uint slot) {
    if (!is_at_home(slot) || ROW != params.landing_row) return uvec2(0u);
    uint rank = 0u;
    [[dont_unroll]] for (uint s = 0u; s < slot; ++s) rank += is_at_home(s) ? 1u : 0u;
    return rank < n_landing ? table_entry(first_landing + rank) : uvec2(0u);
}

void write_slot(uint slot, uint id, float weight, uvec2 address, uvec2 partner) {
    const uint first = ROW * routing_pitch;
    routing[first + slot] = id;
    routing[first + n_used + slot] = floatBitsToUint(weight);
    routing[first + 2u * n_used + 2u * slot] = address.x;
    routing[first + 2u * n_used + 2u * slot + 1u] = address.y;
    routing[first + 4u * n_used + 2u * slot] = partner.x;
    routing[first + 4u * n_used + 2u * slot + 1u] = partner.y;
}

void main() {
    if (ROW >= params.n_rows) {
        for (uint s = gl_LocalInvocationIndex; s < n_used; s += gl_WorkGroupSize.x) write_slot(s, 0u, 0.0, uvec2(0u), uvec2(0u));
        return;
    }
    for (uint e = gl_LocalInvocationIndex; e < N_EXPERTS; e += gl_WorkGroupSize.x) keys[e] = order_key(logit(e));
    barrier();
    vec2 total = vec2(0.0, 1.0); // the logit that numerators are relative to, and what they are divided by
    if (!has(FLAG_SIGMOID) && (by_score() || !has(FLAG_RENORMALISE))) total = softmax_total();
    if (by_score()) key_scores(total);
    if (N_GROUPS > 1u) choose_groups();
    choose();
    for (uint s = gl_LocalInvocationIndex; s < n_used; s += gl_WorkGroupSize.x) {
        chosen_entries[s] = table_entry(layer * N_EXPERTS + chosen_ids[s]);
        if (by_score()) chosen_values[s] = finite_logit(chosen_ids[s]);
    }
    barrier();
    if (has(FLAG_RENORMALISE)) total = chosen_total();
    for (uint s = gl_LocalInvocationIndex; s < n_used; s += gl_WorkGroupSize.x) {
        const uint id = chosen_ids[s];
        const float share = total.y > 0.0 ? gate(chosen_values[s], total.x) / total.y : 1.0 / float(n_used);
        const uvec2 span = uvec2(chosen_entries[s].x & ~AT_HOME, chosen_entries[s].y);
        const uvec2 landing = landing_place(s);
        const bool gathers = has(FLAG_GATHER) && !is_null(landing);
        float weight = share * scale;
        if (!is_null(output_scales)) weight *= load_float(address_add(output_scales, id * 4u));
        write_slot(s, id, weight, gathers ? landing : span, gathers ? span : landing);
        routing_log[first_id + ROW * n_used + s] = id;
    }
    if (has(FLAG_SHARED_GATE) && gl_LocalInvocationIndex == 0u)
        routing[ROW * routing_pitch + 6u * n_used] = floatBitsToUint(sigmoid(finite_logit(N_EXPERTS)));
}
