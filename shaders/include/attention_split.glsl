// Which positions of the KV cache each attention split owns: a function of position and window alone.
// Must be kept in sync with first_seen and split_positions in vkmoe/kernels/attention/twins.py.
// Needs: params.glsl included, N_SPLITS defined as a specialisation constant.
const uint SPLIT_STEP = 32u; // splits are whole multiples of this, so short contexts use few splits

uint current_position(uint context) { return min(params.rows[ROW].position, context - 1u); }

// The first position that is seen: one of the last `window`, or of all where that is 0.
uint first_seen(uint position, uint window) {
    return window != 0u && position >= window ? position - window + 1u : 0u;
}

// Positions per split, so that at most N_SPLITS splits cover 0 ... last.
uint split_positions(uint last) {
    const uint even_share = last / N_SPLITS + 1u;
    return (even_share + SPLIT_STEP - 1u) / SPLIT_STEP * SPLIT_STEP;
}
