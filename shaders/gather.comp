// Computes  for each used slot that has a partner: copies its expert's span from the partner, its home, to the landing place
//           where the slot's kernels read it. Logs two words a slot, 1 + the expert's id if it was copied, else 0.
// Inputs    routing (ids, addresses, partners [n_slots]); spans by address. Outputs: landing places by address; log words
//           [first_filled + 2 * slot ...].
// Who       workgroup -> GROUP_UNITS units of 16 bytes of one slot's span (z), counted in lines (x, y); a lane loads UNITS of
//           them, one workgroup size apart, before it stores any: many loads are in flight and neighbouring lanes take
//           neighbouring units. A workgroup behind the span's end copies nothing.
// Assumes   spans are 16-byte aligned; no two slots share a landing place, and none is a home.
// Dispatch  (ceil(n_groups / n_lines), n_lines, n_used), n_groups being ceil(n_units / GROUP_UNITS)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "store.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 1, std430) writeonly buffer Log { uint filled_log[]; };
layout(push_constant, std430) uniform Push {
    uint n_slots;
    uint n_units;           // of 16 bytes, in a span
    uint first_filled;
};

#include "routing.glsl"

const uint UNITS = 8u;

void copy_units(uvec2 home, uvec2 landing, uint first, uint stride) {
    uvec4 words[UNITS];
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) words[i] = load_words4(address_add(home, (first + i * stride) * 16u));
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) store_words4(address_add(landing, (first + i * stride) * 16u), words[i]);
}

void main() {
    const uint slot = gl_WorkGroupID.z;
    const uint stride = gl_WorkGroupSize.x;
    const uint group = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * stride * UNITS;
    const uvec2 home = routed_partner(slot, n_slots);
    const uvec2 landing = routed_address(slot, n_slots);
    if (group == 0u && gl_LocalInvocationIndex == 0u) {
        const uint word = is_null(home) ? 0u : 1u + routing[slot];
        filled_log[first_filled + 2u * slot] = word;
        filled_log[first_filled + 2u * slot + 1u] = word;
    }
    if (is_null(home)) return;
    const uint first = group + gl_LocalInvocationIndex;
    if (group + UNITS * stride <= n_units) {
        copy_units(home, landing, first, stride);
    } else {
        for (uint unit = first; unit < n_units; unit += stride)
            store_words4(address_add(landing, unit * 16u), load_words4(address_add(home, unit * 16u)));
    }
}
