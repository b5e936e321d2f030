// The tiles of a layer, in rounds. In each those of experts that are read where they are come first, then those of experts that
// were brought for the round.
// Needs: TILES_BINDING and TILES_ACCESS defined.
const uint N_ROUNDS = 33u;

layout(set = 0, binding = TILES_BINDING, std430) TILES_ACCESS buffer Tiles {
    uint round_starts[N_ROUNDS + 1u]; // where each round's tiles begin; the last word is the number of all tiles
    uvec4 tiles[];                    // address of the expert's span; the first of its pairs in `sorted`; how many
};
