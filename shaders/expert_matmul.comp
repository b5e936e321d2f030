// Computes  for each pair of a batch's row and one of its experts, GATE_UP: act[pair][row] = f(dot(gate[row], x) + gate_bias[row],
//           dot(up[row], x) + up_bias[row]), where f is that of expert_gate_up.comp and x that of the pair's row in the batch;
//           PASS 1 stores the gate's part alone, PASS 2 finishes with up (gate and up of different types). Without GATE_UP:
//           y[pair][row] = dot(down[row], act[pair]) + bias[row], unweighted.
// Inputs    x f32 [batch rows or pairs][x_stride vec4s]; tiles, as expert_tiles.comp leaves them, of which those of a round
//           are multiplied; sorted: numbers of pairs, batch row * n_used + rank; params, for the rows in use; spans by
//           address. A fixed span has no tiles: a pair of it is a row of the batch.
// Who       workgroup -> a tile of TILE_ROWS rows of one expert times its pairs (include/tile.glsl).
// Assumes   as matmul.comp; no tile has more than TILE_COLUMNS pairs.
// Dispatch  (most tiles of the round, ceil(n_rows / TILE_ROWS), 1): tiles of the same weights are neighbours, for the caches
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANE_DOTS = 4u;
layout(constant_id = 2) const uint LANE_COLUMNS = 8u;
layout(constant_id = 8) const uint BIASED = 0u;  // spans have biases
#ifdef GATE_UP
layout(constant_id = 9) const uint PASS = 0u;    // 0 both, 1 gate only, 2 up only
layout(constant_id = 10) const uint ACTIVATION = 0u;
const uint N_PARTS = PASS == 0u ? 2u : 1u;
#else
const uint N_PARTS = 1u;
#endif

#define TILES_BINDING 1
#define TILES_ACCESS readonly
#include "tile_list.glsl"
layout(set = 0, binding = 2, std430) readonly buffer Sorted { uint sorted[]; };
#define PARAMS_BINDING 3
#include "params.glsl"
#ifdef GATE_UP
layout(set = 0, binding = 4, std430) buffer Output { float y[]; };
#else
layout(set = 0, binding = 4, std430) writeonly buffer Output { float y[]; };
#endif

layout(push_constant, std430) uniform Push {
    uvec2 span;             // a fixed expert (dense feed-forward, shared expert); null: those of tiles
#ifdef GATE_UP
    uint gate_offset;       // bytes from the start of a span
    uint up_offset;
    uint gate_bias;         // the same of f32 [n_rows], if BIASED
    uint up_bias;
#else
    uint down_offset;
    uint down_bias;
#endif
    uint n_rows;
    uint row_bytes;
    uint n_blocks;
    uint x_stride;          // in vec4
    uint round_index;
    uint pairs_of_x;        // that share a row of x: gate and up n_used, down 1
#ifdef CODE_BOOK_WORDS
    uvec2 code_book;        // see include/types/code_book.glsl
#endif
};

WeightRow expert_span;
uint first_pair;

WeightRow part_row(uint part, uint row) {
#ifdef GATE_UP
    const bool is_up = PASS == 2u || part == 1u;
    return matrix_row(row_add(expert_span, is_up ? up_offset : gate_offset), row, n_rows, row_bytes);
#else
    return matrix_row(row_add(expert_span, down_offset), row, n_rows, row_bytes);
#endif
}

uint column_pair(uint column) { return is_null(span) ? sorted[first_pair + column] : first_pair + column; }

uint column_x(uint column) { return column_pair(column) / pairs_of_x * x_stride; }

// A product plus the bias of its row.
float projected(float product, uint bias_offset, uint row) {
    precise float value = product;
    if (BIASED != 0u) value += span_bias(expert_span, bias_offset, row);
    return value;
}

#ifdef GATE_UP
#include "activation.glsl"

void store_products(uint row, uint column, float products[N_PARTS]) {
    const uint index = column_pair(column) * n_rows + row;
    float value = projected(products[0], PASS == 2u ? up_bias : gate_bias, row);
    if (PASS == 0u) value = activated(value, projected(products[N_PARTS - 1u], up_bias, row));
    if (PASS == 2u) value = activated(y[index], value);
    y[index] = value;
}
#else
void store_products(uint row, uint column, float products[N_PARTS]) {
    y[column_pair(column) * n_rows + row] = projected(products[0], down_bias, row);
}
#endif

#include "tile.glsl"

// Returns how many pairs the tile has; 0: there is no such tile.
uint load_tile(uint tile) {
    if (!is_null(span)) {
        expert_span = to_address(span);
        first_pair = tile * TILE_COLUMNS;
        return first_pair < params.n_rows ? min(params.n_rows - first_pair, TILE_COLUMNS) : 0u;
    }
    const uint index = round_starts[round_index] + tile;
    if (index >= round_starts[round_index + 1u]) return 0u;
    expert_span = to_address(tiles[index].xy);
    first_pair = tiles[index].z;
    return min(tiles[index].w, TILE_COLUMNS);
}

void main() {
    const uint n_pairs = load_tile(gl_WorkGroupID.x);
    if (n_pairs == 0u) return;
    multiply_tile(n_rows, n_pairs, n_blocks);
}
