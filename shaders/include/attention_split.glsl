// Which positions of the KV cache each attention split owns: a function of the position alone.
// Must be kept in sync with split_positions in vkmoe/reference/attention.py.
// Needs: params.glsl included, N_SPLITS defined as a specialisation constant.
const uint SPLIT_STEP = 32u; // splits are whole multiples of this, so short contexts use few splits

uint current_position(uint context) { return min(params.position, context - 1u); }

// Positions per split, so that at most N_SPLITS splits cover 0 ... position.
uint split_positions(uint position) {
    const uint even_share = position / N_SPLITS + 1u;
    return (even_share + SPLIT_STEP - 1u) / SPLIT_STEP * SPLIT_STEP;
}
