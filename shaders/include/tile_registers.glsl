// The mapping of tile.glsl for CPU drivers: lane i has the rows i, i + workgroup size, ..., and walks along them; what it needs
// of x is the same for all lanes. A load costs the same whatever its address, and per lane: where a workgroup is one subgroup
// (ONE_SUBGROUP), its eight lanes load a chunk of a column together, and hand it round.
// Columns go in groups of LANE_COLUMNS, the last few in one of half as many: unpacking costs as much as several columns.
// Drivers run the first round of a loop even where no lane takes part in it, so skipping a group is not free but cheap.
#include "block_parts.glsl"
#ifdef ONE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

const uint TILE_ROWS = gl_WorkGroupSize.x * LANE_DOTS / N_PARTS;
const uint N_SUMS = LANE_DOTS * LANE_COLUMNS;

// Products of part 0 and part 1 of a row are neighbours.
uint dot_part(uint d) { return d % N_PARTS; }
uint dot_row(uint d) { return gl_WorkGroupID.y * TILE_ROWS + d / N_PARTS * gl_WorkGroupSize.x + gl_LocalInvocationIndex; }

// What all lanes have of a chunk of a column's x.
#ifdef ONE_SUBGROUP
vec4 own_x(uint start, uint block, uint t) { return load_x(start + chunk_vec4(block, t, gl_LocalInvocationIndex)); }
vec4 shared_x(vec4 own, uint start, uint block, uint t, uint i) { return subgroupShuffle(own, i); }
bool is_sound() { return gl_NumSubgroups == 1u; }  // a broken promise gives NaN, not a wrong product
#else
vec4 own_x(uint start, uint block, uint t) { return vec4(0.0); }
vec4 shared_x(vec4 own, uint start, uint block, uint t, uint i) { return load_x(start + chunk_vec4(block, t, i)); }
bool is_sound() { return true; }
#endif

// Adds the products of a chunk. One sum for each dot: the sums of several are independent of each other, and run side by side.
void add_column(vec4 w[LANE_DOTS][CHUNK_VEC4S], vec4 own, uint start, uint block, uint t, uint first_sum, inout float sums[N_SUMS]) {
    float chunk_sums[LANE_DOTS];
    [[unroll]] for (uint i = 0u; i < CHUNK_VEC4S; ++i) {
        const vec4 x = shared_x(own, start, block, t, i);
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
            precise float sum = i == 0u ? w[d][i].x * x.x : fma(w[d][i].x, x.x, chunk_sums[d]);
            sum = fma(w[d][i].y, x.y, sum);
            sum = fma(w[d][i].z, x.z, sum);
            chunk_sums[d] = fma(w[d][i].w, x.w, sum);
        }
    }
    [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
        precise float sum = sums[first_sum + d] + chunk_sums[d];
        sums[first_sum + d] = sum;
    }
}

WeightRow lane_rows[LANE_DOTS];

void add_block(uint starts[LANE_COLUMNS], const uint n_columns, uint n_blocks, uint block, inout float sums[N_SUMS]) {
    BlockRow rows[LANE_DOTS];
    [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
        rows[d].row = lane_rows[d];
        load_block_row(n_blocks, block, rows[d]);
    }
    [[dont_unroll]] for (uint t = 0u; t < BLOCK_CHUNKS; ++t) {
        vec4 own[LANE_COLUMNS];
        [[unroll]] for (uint c = 0u; c < n_columns; ++c) own[c] = own_x(starts[c], block, t);
        vec4 w[LANE_DOTS][CHUNK_VEC4S];
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
            next_chunk(n_blocks, block, t, rows[d]);
            unpack_weights(rows[d].chunk, block, t, w[d]);
        }
        [[unroll]] for (uint c = 0u; c < n_columns; ++c)
            add_column(w, own[c], starts[c], block, t, c * LANE_DOTS, sums);
    }
}

// Columns [first, first + n_columns), those before `end` if there are fewer.
void multiply_columns(uint first, const uint n_columns, uint end, uint n_rows, uint n_blocks) {
    uint starts[LANE_COLUMNS];
    [[unroll]] for (uint c = 0u; c < n_columns; ++c) starts[c] = column_x(min(first + c, end - 1u));
    float sums[N_SUMS];
    [[unroll]] for (uint i = 0u; i < N_SUMS; ++i) sums[i] = 0.0;
    [[dont_unroll]] for (uint block = 0u; block < n_blocks; ++block) add_block(starts, n_columns, n_blocks, block, sums);
    [[unroll]] for (uint c = 0u; c < n_columns; ++c) {
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; d += N_PARTS) {
            float products[N_PARTS];
            [[unroll]] for (uint p = 0u; p < N_PARTS; ++p)
                products[p] = is_sound() ? sums[c * LANE_DOTS + d + p] : uintBitsToFloat(0x7FC00000u);
            if (first + c < end && dot_row(d) < n_rows) store_products(dot_row(d), first + c, products);
        }
    }
}

void multiply_tile(uint n_rows, uint n_columns, uint n_blocks) {
    const uint half_group = LANE_COLUMNS / 2u;
    [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) lane_rows[d] = part_row(dot_part(d), dot_row(d));
    uint first = 0u;
    for (; first + half_group < n_columns; first += LANE_COLUMNS)
        multiply_columns(first, LANE_COLUMNS, n_columns, n_rows, n_blocks);
    for (; first < n_columns; first += half_group)
        multiply_columns(first, half_group, n_columns, n_rows, n_blocks);
}
