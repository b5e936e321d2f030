// Computes  for each row of a batch the 64 largest logits of one chunk (lower id wins ties), and the chunk's maximum and sum of
//           e^(logit - maximum).
// Inputs    logits f32 [n_vocab]. Output: one list of words a chunk, [maximum, sum, count, NaN flag, 64 ids, 64 logits],
//           descending; entries past `count` are id 0xFFFFFFFF and -inf. Rows lie a pitch behind one another.
// Who       one workgroup per row (z) and chunk of ceil(n_vocab / workgroups) logits, items of lane l: l, l + size, ...
// Assumes   n_vocab < 2^24. NaN counts as -inf and raises the flag.
// Dispatch  (number of lists, 1, rows), then candidates_merge.
#version 460
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Logits { float logits[]; };
layout(set = 0, binding = 1, std430) writeonly buffer Lists { uint lists[]; };
layout(push_constant, std430) uniform Push {
    uint n_vocab;
    uint logits_pitch;      // from row to row
    uint lists_pitch;
};

#include "reduce.glsl"
#include "float_order.glsl"

uint chunk_start; // first id of this workgroup's chunk

float logit(uint item) { return logits[gl_WorkGroupID.z * logits_pitch + chunk_start + item]; }

uint item_key(uint item) { return order_key(logit(item)); }
uint item_id(uint item) { return chunk_start + item; }

#include "select_top.glsl"
#include "candidate_lists.glsl"

// Maximum, sum of exponentials relative to it, and number of NaNs, over the chunk.
vec3 chunk_statistics(uint n_items) {
    float top = LOWEST_FLOAT, sum = 0.0, n_nans = 0.0;
    for (uint i = gl_LocalInvocationIndex; i < n_items; i += gl_WorkGroupSize.x) {
        const float raw = logit(i);
        const float value = finite_key_value(order_key(raw));
        const float new_top = max(top, value);
        sum = sum * exp(top - new_top) + exp(value - new_top);
        top = new_top;
        if (is_nan_bits(floatBitsToUint(raw))) n_nans += 1.0;
    }
    const float chunk_top = workgroup_max(top);
    const float chunk_sum = workgroup_sum(sum * exp(top - chunk_top));
    return vec3(chunk_top, chunk_sum, workgroup_sum(n_nans));
}

void main() {
    const uint chunk = (n_vocab + gl_NumWorkGroups.x - 1u) / gl_NumWorkGroups.x;
    chunk_start = min(gl_WorkGroupID.x * chunk, n_vocab);
    const uint n_items = min(chunk, n_vocab - chunk_start);
    const uint first = gl_WorkGroupID.z * lists_pitch + gl_WorkGroupID.x * LIST_WORDS;

    const vec3 statistics = chunk_statistics(n_items);
    const uint count = take_top(n_items);
    if (gl_LocalInvocationIndex == 0u) {
        lists[first + LIST_MAXIMUM] = floatBitsToUint(statistics.x);
        lists[first + LIST_SUM] = floatBitsToUint(statistics.y);
        lists[first + LIST_COUNT] = count;
        lists[first + LIST_NAN] = statistics.z > 0.0 ? 1u : 0u;
    }
    for (uint i = gl_LocalInvocationIndex; i < N_TOP; i += gl_WorkGroupSize.x) {
        const uint place = i < count ? rank_of(i, count) : i;
        lists[first + LIST_IDS + place] = i < count ? taken_ids[i] : 0xFFFFFFFFu;
        lists[first + LIST_LOGITS + place] = i < count ? floatBitsToUint(key_value(taken_keys[i])) : 0xFF800000u;
    }
}
