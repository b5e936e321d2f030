// What a sequence keeps for a layer with a recurrent state: the last rows that were projected, by position, and the state behind
// each of the last N_VERSIONS positions, so that a text can go back by a few tokens without being computed anew.
// Needs: params.glsl, store.glsl.
const uint RING_ROWS = 16u; // of the batch's rows and of those that a convolution reads before them: 8 + 7 at most

uint sequence_of(uint row) { return params.rows[row].sequence; }
uint position_of(uint row) { return params.rows[row].position; }

// Whether a row is of the batch and of this sequence. Rows of a sequence stand together, in the order of their positions.
bool continues(uint row, uint sequence) { return row < params.n_rows && sequence_of(row) == sequence; }

// Stores a number of what a sequence keeps: the ring or a state, which are on the device.
void store_kept(uvec2 kept, float value) { store_word(kept, floatBitsToUint(value)); }
