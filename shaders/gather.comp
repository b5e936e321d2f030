// Computes  for each used slot of the landing row that has a partner: copies its expert's span from the partner, its home, to
//           the landing place where the slot's kernels read it. Logs two words a slot of every row in use, 1 + the expert's id
//           if it was copied, else 0.
// Inputs    params; routing (ids, addresses, partners [n_slots]), rows a pitch behind one another; spans by address. Outputs:
//           landing places by address; log words [first_filled + 2 * (n_slots * row + slot) ...].
// Who       workgroup -> GROUP_UNITS units of 16 bytes of one slot's span (z), counted in lines (x, y); a lane loads UNITS of
//           them, one workgroup size apart, before it stores any: many loads are in flight and neighbouring lanes take
//           neighbouring units. A workgroup behind the span's end copies nothing.
// Assumes   spans are 16-byte aligned; no two slots share a landing place, and none is a home.
// Dispatch  (ceil(n_groups / n_lines), n_lines, n_used), n_groups being ceil(n_units / GROUP_UNITS)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "store.glsl"
#define PARAMS_BINDING 1
#define ROW params.landing_row
#include "params.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Log { uint filled_log[]; };
layout(push_constant, std430) uniform Push {
    uint n_slots;
    uint n_units;           // of 16 bytes, in a span
    uint first_filled;
    uint routing_pitch;     // from row to row
};

uint first_routing;

#include "routing.glsl"

const uint UNITS = 8u;

void copy_units(uvec2 home, uvec2 landing, uint first, uint stride) {
    uvec4 words[UNITS];
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) words[i] = load_words4(address_add(home, (first + i * stride) * 16u));
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) store_words4(address_add(landing, (first + i * stride) * 16u), words[i]);
}

void log_copied(uint row, uint slot, uint word) {
    const uint at = first_filled + 2u * (n_slots * row + slot);
    filled_log[at] = word;
    filled_log[at + 1u] = word;
}

void main() {
    const uint slot = gl_WorkGroupID.z;
    const uint stride = gl_WorkGroupSize.x;
    const uint group = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * stride * UNITS;
    const bool lands = ROW < params.n_rows;
    first_routing = (lands ? ROW : 0u) * routing_pitch;
    const uvec2 partner = routed_partner(slot, n_slots), landing = routed_address(slot, n_slots);
    const uvec2 home = lands ? partner : uvec2(0u);
    if (group == 0u) {
        for (uint row = gl_LocalInvocationIndex; row < params.n_rows; row += stride)
            log_copied(row, slot, row == ROW && !is_null(home) ? 1u + routed_id(slot) : 0u);
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
