// Computes  where the chosen experts of each row of a batch are now: those with an address come first, in the order they had, then
//           the others, whose addresses are null. Ids and weights move with them.
// Inputs    routing words [n_used ids | n_used weights | ...] a row, as router_topk leaves them; params; the expert table by
//           address, uvec2 entries [n_layers][N_EXPERTS]. Out: the words of a row in their new order, addresses behind the
//           weights, then partners, all of them null. Of inert rows addresses are null. Rows lie a pitch behind one another.
// Who       workgroup -> one row of the batch (z); lane s -> slots s, s + size, ...
// Assumes   n_used <= MAX_USED; ids beyond N_EXPERTS count as the last.
// Dispatch  (1, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.z
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint N_EXPERTS = 128u;

layout(set = 0, binding = 0, std430) buffer Routing { uint routing[]; };
layout(push_constant, std430) uniform Push {
    uint layer;
    uint n_used;
    uint routing_pitch;     // from row to row of the batch
};

const uint AT_HOME = 1u;   // in the low word of an entry
const uint MAX_USED = 32u;

shared uint ids[MAX_USED];
shared uint weights[MAX_USED];
shared uvec2 places[MAX_USED];

uvec2 place_of(uint id) {
    if (ROW >= params.n_rows) return uvec2(0u);
    const uint entry = layer * N_EXPERTS + min(id, N_EXPERTS - 1u);
    const uvec2 place = AddressEntry(address_add_product(params.expert_table, entry, 8u)).address;
    return uvec2(place.x & ~AT_HOME, place.y);
}

// Where a slot goes: behind those before it that have an address as it has one, or has none.
uint new_slot(uint slot) {
    uint n_before = 0u, n_found = 0u;
    for (uint s = 0u; s < n_used; ++s) {
        const uint found = is_null(places[s]) ? 0u : 1u;
        n_before += s < slot ? found : 0u;
        n_found += found;
    }
    return is_null(places[slot]) ? n_found + slot - n_before : n_before;
}

void main() {
    const uint first = ROW * routing_pitch;
    for (uint s = gl_LocalInvocationIndex; s < n_used; s += gl_WorkGroupSize.x) {
        ids[s] = routing[first + s];
        weights[s] = routing[first + n_used + s];
        places[s] = place_of(ids[s]);
    }
    barrier();
    for (uint s = gl_LocalInvocationIndex; s < n_used; s += gl_WorkGroupSize.x) {
        const uint slot = new_slot(s);
        routing[first + slot] = ids[s];
        routing[first + n_used + slot] = weights[s];
        routing[first + 2u * n_used + 2u * slot] = places[s].x;
        routing[first + 2u * n_used + 2u * slot + 1u] = places[s].y;
        routing[first + 4u * n_used + 2u * slot] = 0u;
        routing[first + 4u * n_used + 2u * slot + 1u] = 0u;
    }
}
