// Computes  the 64 largest logits of all lists (lower id wins ties) in descending order, and log sum e^logit over the
//           vocabulary.
// Inputs    the n_lists lists of candidates_partial, of each row of a batch. Output words: [count, NaN flag, log-sum-exp (float
//           bits), 0, 64 ids, 64 logits (float bits)]; entries past `count` are id 0xFFFFFFFF and -inf. The first id is the
//           argmax.
// Who       workgroup -> one row (z); item i is entry i % 64 of list i / 64.
// Assumes   n_lists >= 1. Without a finite logit the log-sum-exp is about the lowest float.
// Dispatch  (1, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Lists { uint lists[]; };
layout(set = 0, binding = 1, std430) writeonly buffer Out { uint candidates[]; };
layout(push_constant, std430) uniform Push {
    uint n_lists;
    uint lists_pitch;       // from row to row
    uint candidates_pitch;
};

#include "reduce.glsl"
#include "float_order.glsl"
#include "candidate_lists.glsl"

// The word at which a list begins.
uint list_start(uint list) { return gl_WorkGroupID.z * lists_pitch + list * LIST_WORDS; }

uint item_key(uint item) {
    const uint first = list_start(item / 64u);
    if (item % 64u >= lists[first + LIST_COUNT]) return KEY_NONE;
    return order_key(uintBitsToFloat(lists[first + LIST_LOGITS + item % 64u]));
}
uint item_id(uint item) { return lists[list_start(item / 64u) + LIST_IDS + item % 64u]; }

#include "select_top.glsl"

float log_sum_exp() {
    float top = LOWEST_FLOAT, sum = 0.0;
    for (uint l = gl_LocalInvocationIndex; l < n_lists; l += gl_WorkGroupSize.x) {
        top = max(top, uintBitsToFloat(lists[list_start(l) + LIST_MAXIMUM]));
    }
    top = workgroup_max(top);
    for (uint l = gl_LocalInvocationIndex; l < n_lists; l += gl_WorkGroupSize.x) {
        const float list_top = uintBitsToFloat(lists[list_start(l) + LIST_MAXIMUM]);
        sum += uintBitsToFloat(lists[list_start(l) + LIST_SUM]) * exp(list_top - top);
    }
    return top + log(workgroup_sum(sum));
}

float count_nan_lists() {
    float flagged = 0.0;
    for (uint l = gl_LocalInvocationIndex; l < n_lists; l += gl_WorkGroupSize.x) {
        flagged += float(lists[list_start(l) + LIST_NAN]);
    }
    return workgroup_sum(flagged);
}

void main() {
    const uint first = gl_WorkGroupID.z * candidates_pitch;
    const float total = log_sum_exp();
    const float n_nan_lists = count_nan_lists();
    const uint count = take_top(n_lists * N_TOP);
    if (gl_LocalInvocationIndex == 0u) {
        candidates[first + OUT_COUNT] = count;
        candidates[first + OUT_NAN] = n_nan_lists > 0.0 ? 1u : 0u;
        candidates[first + OUT_LOG_SUM_EXP] = floatBitsToUint(total);
        candidates[first + 3u] = 0u;
    }
    for (uint i = gl_LocalInvocationIndex; i < N_TOP; i += gl_WorkGroupSize.x) {
        const uint place = i < count ? rank_of(i, count) : i;
        candidates[first + OUT_IDS + place] = i < count ? taken_ids[i] : 0xFFFFFFFFu;
        candidates[first + OUT_LOGITS + place] = i < count ? floatBitsToUint(key_value(taken_keys[i])) : 0xFF800000u;
    }
}
