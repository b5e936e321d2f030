// The tiles of a layer, and which of them are whose turn. Round 0 are those of experts that are read where they are; in the
// rounds behind it are those of experts that are brought first.
// Needs: TILES_BINDING and TILES_ACCESS defined.
const uint N_ROUNDS = 33u;

layout(set = 0, binding = TILES_BINDING, std430) TILES_ACCESS buffer Tiles {
    uint round_starts[36];   // number of the first tile of each round; behind them that of all
    uvec4 tiles[];           // address of the expert's span; the first of its pairs in `sorted`; how many
};
