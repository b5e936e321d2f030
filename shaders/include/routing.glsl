// The routing of the layer at hand: uint words ids [n_slots], weights (float bits) [n_slots], addresses (uvec2) [n_slots],
// partners (uvec2) [n_slots]: where else the slot's expert is or shall be, null for nowhere. A shared expert's weight may
// follow. Written by router_topk.
// Needs: the array `routing`.
float routed_weight(uint slot, uint n_slots) { return uintBitsToFloat(routing[n_slots + slot]); }

uvec2 routed_address(uint slot, uint n_slots) {
    return uvec2(routing[2u * n_slots + 2u * slot], routing[2u * n_slots + 2u * slot + 1u]);
}

uvec2 routed_partner(uint slot, uint n_slots) {
    return uvec2(routing[4u * n_slots + 2u * slot], routing[4u * n_slots + 2u * slot + 1u]);
}

// Where a slot's expert is stored while it is read; null for nowhere.
#ifdef KEEP
uvec2 landing_of(uint slot, uint n_slots) { return routed_partner(slot, n_slots); }
#else
uvec2 landing_of(uint slot, uint n_slots) { return uvec2(0u); }
#endif
