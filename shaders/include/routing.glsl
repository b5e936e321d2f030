// The routing of a row of the batch in the layer at hand: uint words ids [n_slots], weights (float bits) [n_slots], addresses
// (uvec2) [n_slots], partners (uvec2) [n_slots]: where else the slot's expert is or shall be, null for nowhere. A shared
// expert's weight may follow. Written by router_topk; for rows that are inert, addresses and partners are null.
// Needs: the array `routing`, and `first_routing`, the word at which the routing of the row at hand begins.
uint routed_id(uint slot) { return routing[first_routing + slot]; }

float routed_weight(uint slot, uint n_slots) { return uintBitsToFloat(routing[first_routing + n_slots + slot]); }

uvec2 routed_address(uint slot, uint n_slots) {
    return uvec2(routing[first_routing + 2u * n_slots + 2u * slot], routing[first_routing + 2u * n_slots + 2u * slot + 1u]);
}

uvec2 routed_partner(uint slot, uint n_slots) {
    return uvec2(routing[first_routing + 4u * n_slots + 2u * slot], routing[first_routing + 4u * n_slots + 2u * slot + 1u]);
}

// Where a slot's expert is stored while it is read; null for nowhere.
#ifdef KEEP
uvec2 landing_of(uint slot, uint n_slots) { return routed_partner(slot, n_slots); }
#else
uvec2 landing_of(uint slot, uint n_slots) { return uvec2(0u); }
#endif
