// Computes  for each used slot of the landing row that has a partner: copies its expert's span from the partner, its home, to
//           the landing place where the slot's kernels read it. Logs two words a slot of every row in use, 1 + the expert's id
//           if it was copied, else 0.
// Inputs    params; routing (ids, addresses, partners [n_slots]), rows a pitch behind one another; spans by address. Outputs:
//           landing places by address; log words [first_filled + 2 * (n_slots * row + slot) ...].
// Who       workgroup -> its part of one slot's span (z), see include/copy_span.glsl.
// Assumes   spans are 16-byte aligned; no two slots share a landing place, and none is a home.
// Dispatch  (..., ..., n_used)
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

#include "copy_span.glsl"

void log_copied(uint row, uint slot, uint word) {
    const uint at = first_filled + 2u * (n_slots * row + slot);
    filled_log[at] = word;
    filled_log[at + 1u] = word;
}

void main() {
    const uint slot = gl_WorkGroupID.z;
    const bool lands = ROW < params.n_rows;
    first_routing = (lands ? ROW : 0u) * routing_pitch;
    const uvec2 partner = routed_partner(slot, n_slots), landing = routed_address(slot, n_slots);
    const uvec2 home = lands ? partner : uvec2(0u);
    if (first_unit() == 0u) {
        for (uint row = gl_LocalInvocationIndex; row < params.n_rows; row += gl_WorkGroupSize.x)
            log_copied(row, slot, row == ROW && !is_null(home) ? 1u + routed_id(slot) : 0u);
    }
    if (!is_null(home)) copy_span(home, landing, n_units);
}
