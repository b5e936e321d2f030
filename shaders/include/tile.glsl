// Products of the rows of quantised matrices with many columns x at once: tiles of rows times columns, for prompts. Weights
// become numbers once for all columns of a tile. Three mappings:
//   default         include/tile_shared.glsl: tiles in shared memory. For GPUs. With HALF_TILES products are of f16.
//   MATRIX_TILES    include/tile_matrix.glsl: the same, multiplied by matrix units.
//   BLOCK_PER_LANE  include/tile_registers.glsl: weights and sums in registers. For CPU drivers.
// In both, a product is one sum in one order that the type of the weights decides: neither the size of a tile, nor the place of
// a row or column in it, nor its neighbours change a bit of it.
// Needs: address.glsl, weight_row.glsl, a TYPE_ define, `layout(local_size_x_id = 0) in;`, and
//   LANE_DOTS, LANE_COLUMNS    constants: rows and columns whose products a lane has at once, powers of two from 4 on; with
//                              MATRIX_TILES those of a subgroup, whole matrices
//   N_PARTS                    constant: matrices whose products belong together (gate and up: 2)
//   WeightRow part_row(uint part, uint row)                     a row of one of them; rows behind the last are the last
//   uint column_x(uint column)                                  where x of a column of this tile begins, in vec4
//   void store_products(uint row, uint column, float products[N_PARTS])   called for rows before n_rows only
// Gives multiply_tile(n_rows, n_columns, n_blocks): all products of this workgroup's rows, from gl_WorkGroupID.y * TILE_ROWS
// on, with columns [0, n_columns) of the tile. All arguments are the same in all lanes.
layout(constant_id = 3) const uint MATRIX_ROWS = 16u;  // these five with MATRIX_TILES: what matrix units multiply at once
layout(constant_id = 4) const uint MATRIX_COLUMNS = 16u;
layout(constant_id = 5) const uint MATRIX_DEPTH = 16u;
layout(constant_id = 6) const uint SUBGROUP_SIZE = 32u;
layout(constant_id = 7) const uint LOADS_AHEAD = 1u;   // what the next step needs is loaded during a step

#ifdef MATRIX_TILES
const uint TILE_COLUMNS = LANE_DOTS * LANE_COLUMNS / SUBGROUP_SIZE;
#else
const uint TILE_COLUMNS = LANE_DOTS * LANE_COLUMNS;
#endif
const uint CHUNK_VEC4S = 8u;

#ifdef LOAD_64BIT
layout(set = 0, binding = 0, std430) readonly buffer Input { u64vec2 x_halves[]; };

vec4 load_x(uint index4) {
    const u64vec2 halves = x_halves[index4];
    return uintBitsToFloat(uvec4(unpackUint2x32(halves.x), unpackUint2x32(halves.y)));
}
#else
layout(set = 0, binding = 0, std430) readonly buffer Input { vec4 x4[]; };

vec4 load_x(uint index4) { return x4[index4]; }
#endif

#ifndef BLOCK_PER_LANE
#define SHARED_CODE_BOOK
#endif
#include "weights.glsl"

// Where vec4 i of a chunk's activations is.
uint chunk_vec4(uint block, uint t, uint i) { return chunk_x(block, t) + (i < 4u ? i : GROUP_B_OFFSET + i - 4u); }

#ifdef Q_BIAS
// The inverse of the row's unit (tile_matrix.glsl): weights of these types are divided by it with their scales.
float w_inverse = 1.0;
#endif

// The 32 weights of a chunk.
void unpack_weights(WeightChunk chunk, uint block, uint t, out vec4 w[CHUNK_VEC4S]) {
    vec4 q[CHUNK_VEC4S];
    vec4 scale;
    unpack_chunk(chunk, block, t, q, scale);
#ifdef Q_UNIT
    scale *= Q_UNIT;
#endif
#ifdef Q_BIAS
    scale *= w_inverse;
#endif
    [[unroll]] for (uint i = 0u; i < CHUNK_VEC4S; ++i) {
        const vec2 of_half = i < 4u ? scale.xy : scale.zw;
#ifdef HAS_MIN
        precise vec4 weight = fma(vec4(of_half.x), q[i], vec4(-of_half.y));
#elif defined(Q_BIAS)
        precise vec4 weight = fma(vec4(of_half.x), q[i], vec4(-Q_BIAS * of_half.x));
#else
        precise vec4 weight = of_half.x * q[i];
#endif
        w[i] = weight;
    }
}

#if defined(BLOCK_PER_LANE)
#include "tile_registers.glsl"
#elif defined(MATRIX_TILES)
#include "tile_matrix.glsl"
#else
#include "tile_shared.glsl"
#endif
