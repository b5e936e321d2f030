// Computes  y[column][row] = dot(W[row], x[column]) + bias[row] for the rows of a batch, which are this kernel's columns;
//           RESIDUAL: adds that to y instead, if ADDS. Up to three stacked matrices of one type share the dispatch, or a stack of one
//           for each head multiplies each head's part of x.
// Inputs    x f32, column c of head h from x_offset + c * x_stride + h * x_head_stride on, all in vec4; W [heads][n_rows] by
//           address; params (how many columns there are). y f32: word y_offset + c * y_stride + h * n_rows + row.
// Who       workgroup -> a tile of TILE_ROWS rows times TILE_COLUMNS columns of one head (include/tile.glsl).
// Assumes   rows are 16-byte aligned; the workgroup size is 8 (BLOCK_PER_LANE), else a power of two, 32 to 256.
// Dispatch  (ceil(most columns / TILE_COLUMNS), ceil(n_rows / TILE_ROWS), heads): tiles of the same weights are neighbours, so
//           that caches have them
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint LANE_DOTS = 4u;
layout(constant_id = 2) const uint LANE_COLUMNS = 8u;
#ifdef RESIDUAL
layout(constant_id = 8) const uint ADDS = 1u; // to what y holds; else that is not read
#endif
const uint N_PARTS = 1u;

#ifdef RESIDUAL
layout(set = 0, binding = 1, std430) buffer Output { float y[]; };
#else
layout(set = 0, binding = 1, std430) writeonly buffer Output { float y[]; };
#endif
#define PARAMS_BINDING 2
#include "params.glsl"

layout(push_constant, std430) uniform Push {
    uvec2 weights0;
    uvec2 weights1;
    uvec2 weights2;
    uvec2 bias;             // f32 [n_rows]; null: none
    uint rows_end0;         // rows [0, rows_end0) are of weights0, up to rows_end1 of weights1, up to n_rows of weights2
    uint rows_end1;
    uint n_rows;            // of a head
    uint row_bytes;
    uint n_blocks;
    uint x_offset;          // this one and the next two in vec4
    uint x_stride;
    uint x_head_stride;
    uint y_offset;
    uint y_stride;
#ifdef CODE_BOOK_WORDS
    uvec2 code_book;        // see include/types/code_book.glsl
#endif
};

WeightRow part_row(uint part, uint row) {
    const uint clamped = min(row, n_rows - 1u);
    const bool is_first = clamped < rows_end0, is_second = clamped < rows_end1;
    const uvec2 behind_first = is_second ? weights1 : weights2;
    const uint of_head = gl_WorkGroupID.z * n_rows + clamped, of_later = clamped - (is_second ? rows_end0 : rows_end1);
    return address_add_product(to_address(is_first ? weights0 : behind_first), is_first ? of_head : of_later, row_bytes);
}

uint first_column;

uint column_x(uint column) { return x_offset + gl_WorkGroupID.z * x_head_stride + (first_column + column) * x_stride; }

void store_products(uint row, uint column, float products[N_PARTS]) {
    precise float value = products[0];
    if (!is_null(bias)) value += load_float(address_add(bias, row * 4u));
    const uint index = y_offset + (first_column + column) * y_stride + gl_WorkGroupID.z * n_rows + row;
#ifdef RESIDUAL
    if (ADDS != 0u) value += y[index];
#endif
    y[index] = value;
}

#include "tile.glsl"

void main() {
    first_column = gl_WorkGroupID.x * TILE_COLUMNS;
    const uint n_columns = params.n_rows;
    if (first_column >= n_columns) return;
    multiply_tile(n_rows, min(n_columns - first_column, TILE_COLUMNS), n_blocks);
}
