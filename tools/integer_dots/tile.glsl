// Takes the place of shaders/include/tile.glsl with MATRIX_TILES: the same tiles and loads, with products of 8-bit numbers and sums
// of s32 for blocks of 32, which are then scaled and added up in f32. A step has two blocks. Activations stand as quantise.comp
// leaves them: three 16-byte words a block, 32 numbers of 8 bits, then scale, and scale * (sum of each 16 numbers).
// weight = scale * number - min, with number in -128..127.
#include "matrix_units.glsl"
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require

layout(constant_id = 3) const uint MATRIX_ROWS = 16u;
layout(constant_id = 4) const uint MATRIX_COLUMNS = 16u;
layout(constant_id = 5) const uint MATRIX_DEPTH = 16u; // 8, 16 or 32
layout(constant_id = 6) const uint SUBGROUP_SIZE = 32u;
layout(constant_id = 7) const uint LOADS_AHEAD = 1u;

layout(set = 0, binding = 0, std430) readonly buffer Input { uvec4 x_words[]; };

#include "weights.glsl"
#if defined(HAS_MIN) && !defined(NO_MINS)
#define ADDS_MINS
#endif

const uint TILE_DOTS = gl_WorkGroupSize.x;
const uint TILE_ROWS = TILE_DOTS / N_PARTS;
const uint TILE_COLUMNS = LANE_DOTS * LANE_COLUMNS / SUBGROUP_SIZE;
const uint DOT_TEAMS = TILE_DOTS / LANE_DOTS;
const uint ROW_MATRICES = LANE_DOTS / MATRIX_ROWS, COLUMN_MATRICES = LANE_COLUMNS / MATRIX_COLUMNS;
const uint N_MATRICES = ROW_MATRICES * COLUMN_MATRICES, MATRIX_SIZE = MATRIX_ROWS * MATRIX_COLUMNS;
const uint BLOCK_SIZE = 32u, STEP_BLOCKS = 2u, BLOCK_WORDS4 = 3u;
const uint STEP_SLICES = STEP_BLOCKS * 2u;   // of 16 bytes, of a row or column
const uint LINE_SLICES = STEP_SLICES + 1u; // an empty one, for the banks
const uint LANE_SLICES = (TILE_COLUMNS * STEP_SLICES + TILE_DOTS - 1u) / TILE_DOTS;
const uint LANE_HEADS = (TILE_COLUMNS * STEP_BLOCKS + TILE_DOTS - 1u) / TILE_DOTS;
const uint BLOCK_DEPTHS = BLOCK_SIZE / MATRIX_DEPTH;

// Matrices of fewer than 16 columns begin within a slice.
#ifdef HALF_SLICES
#define Part uvec2
const uint SLICE_PARTS = 2u, PART_SIZE = 8u;
#else
#define Part uvec4
const uint SLICE_PARTS = 1u, PART_SIZE = 16u;
#endif
const uint LINE_PARTS = LINE_SLICES * SLICE_PARTS;

shared Part w_tile[TILE_DOTS * LINE_PARTS], x_tile[TILE_COLUMNS * LINE_PARTS];
shared float w_scales[STEP_BLOCKS * TILE_DOTS], x_scales[STEP_BLOCKS * TILE_COLUMNS];
#ifdef ADDS_MINS
shared float w_mins[STEP_BLOCKS * TILE_DOTS], x_sums[STEP_BLOCKS * TILE_COLUMNS];
#endif
shared float staged[TILE_DOTS / SUBGROUP_SIZE * MATRIX_SIZE];

#define SumMatrix coopmat<float, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_COLUMNS, gl_MatrixUseAccumulator>
#define DotMatrix coopmat<int, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_COLUMNS, gl_MatrixUseAccumulator>
#define WeightMatrix coopmat<int8_t, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_DEPTH, gl_MatrixUseA>
#define InputMatrix coopmat<int8_t, gl_ScopeSubgroup, MATRIX_DEPTH, MATRIX_COLUMNS, gl_MatrixUseB>

SumMatrix sums[N_MATRICES];

WeightRow tile_row(uint d) { return part_row(d % N_PARTS, gl_WorkGroupID.y * TILE_ROWS + d / N_PARTS); }
uint team_dot() { return gl_SubgroupID % DOT_TEAMS * LANE_DOTS; }
uint team_column() { return gl_SubgroupID / DOT_TEAMS * LANE_COLUMNS; }
uint brought_slice(uint i) { return (gl_LocalInvocationIndex + i * TILE_DOTS) & (TILE_COLUMNS * STEP_SLICES - 1u); }
uint brought_head(uint i) { return (gl_LocalInvocationIndex + i * TILE_DOTS) & (TILE_COLUMNS * STEP_BLOCKS - 1u); }

struct StepInput {
    WeightChunk chunks[2];
    uvec4 x[LANE_SLICES];
    uvec4 heads[LANE_HEADS];
};

void load_step(WeightRow row, uint x_starts[LANE_SLICES], uint head_starts[LANE_HEADS], uint n_blocks, uint step_index,
               out StepInput loaded) {
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        const uint chunk = step_index * 2u + i;
        load_chunk(row, n_blocks, chunk / BLOCK_CHUNKS, chunk % BLOCK_CHUNKS, loaded.chunks[i]);
    }
    const uint at = step_index * STEP_BLOCKS * BLOCK_WORDS4;
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) loaded.x[i] = x_words[x_starts[i] + at];
    [[unroll]] for (uint i = 0u; i < LANE_HEADS; ++i) loaded.heads[i] = x_words[head_starts[i] + at];
}

// The 64 weights of a row as 8-bit numbers, and (scale, min) of each block.
void unpack_step(StepInput loaded, uint step_index, out uvec4 numbers[STEP_SLICES], out vec4 scale) {
#ifdef TYPE_Q4_K
    scale = k_quant_scales(loaded.chunks[0].common_word, step_index * 2u % BLOCK_CHUNKS);
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        numbers[i] = loaded.chunks[i].own[0] & 0x0F0F0F0Fu;
        numbers[i + 2u] = (loaded.chunks[i].own[0] >> 4u) & 0x0F0F0F0Fu;
    }
#elif defined(TYPE_Q8_0)
    scale = vec4(0.0);
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        scale[2u * i] = half_of_pair(loaded.chunks[i].single[0], i);
        [[unroll]] for (uint k = 0u; k < 2u; ++k) numbers[2u * i + k] = loaded.chunks[i].own[k];
    }
#endif
}

#ifdef HALF_SLICES
#define STORE_SLICE(tile, at, slice) (tile[2u * (at)] = (slice).xy, tile[2u * (at) + 1u] = (slice).zw)
#else
#define STORE_SLICE(tile, at, slice) tile[at] = (slice)
#endif

void store_step(StepInput loaded, uint step_index) {
    uvec4 numbers[STEP_SLICES];
    vec4 scale;
    unpack_step(loaded, step_index, numbers, scale);
    const uint lane = gl_LocalInvocationIndex;
    [[unroll]] for (uint i = 0u; i < STEP_SLICES; ++i) STORE_SLICE(w_tile, lane * LINE_SLICES + i, numbers[i]);
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        const uint slice = brought_slice(i);
        STORE_SLICE(x_tile, slice / STEP_SLICES * LINE_SLICES + slice % STEP_SLICES, loaded.x[i]);
    }
    [[unroll]] for (uint i = 0u; i < STEP_BLOCKS; ++i) w_scales[i * TILE_DOTS + lane] = scale[2u * i];
    [[unroll]] for (uint i = 0u; i < LANE_HEADS; ++i) x_scales[brought_head(i)] = uintBitsToFloat(loaded.heads[i].x);
#ifdef ADDS_MINS
    [[unroll]] for (uint i = 0u; i < STEP_BLOCKS; ++i) w_mins[i * TILE_DOTS + lane] = -scale[2u * i + 1u];
    [[unroll]] for (uint i = 0u; i < LANE_HEADS; ++i)
        x_sums[brought_head(i)] = uintBitsToFloat(loaded.heads[i].y) + uintBitsToFloat(loaded.heads[i].z);
#endif
}

// The numbers of a block's rows in all columns of a matrix, those of its columns in all rows.
#define LOAD_ROWS(matrix, numbers, at) coopMatLoad(matrix, numbers, at, 0u, gl_CooperativeMatrixLayoutColumnMajor)
#define LOAD_COLUMNS(matrix, numbers, at) coopMatLoad(matrix, numbers, at, 0u, gl_CooperativeMatrixLayoutRowMajor)

void add_block(uint block) {
    const uint place = block * BLOCK_SIZE / PART_SIZE;
    WeightMatrix w[ROW_MATRICES * BLOCK_DEPTHS];
    SumMatrix row_scales[ROW_MATRICES]; // each declared alone: glslang forgets the shape of others
    SumMatrix row_mins[ROW_MATRICES];
    [[unroll]] for (uint r = 0u; r < ROW_MATRICES; ++r) {
        const uint dot = team_dot() + r * MATRIX_ROWS;
        [[unroll]] for (uint k = 0u; k < BLOCK_DEPTHS; ++k)
            coopMatLoad(w[r * BLOCK_DEPTHS + k], w_tile, dot * LINE_PARTS + place + k * MATRIX_DEPTH / PART_SIZE, LINE_PARTS,
                        gl_CooperativeMatrixLayoutRowMajor);
        LOAD_ROWS(row_scales[r], w_scales, block * TILE_DOTS + dot);
#ifdef ADDS_MINS
        LOAD_ROWS(row_mins[r], w_mins, block * TILE_DOTS + dot);
#endif
    }
    [[unroll]] for (uint c = 0u; c < COLUMN_MATRICES; ++c) {
        const uint column = team_column() + c * MATRIX_COLUMNS;
        if (LOADS_AHEAD == 0u && c > 0u) share_in_subgroup(); // nothing is loaded before: registers
        InputMatrix x[BLOCK_DEPTHS];
        SumMatrix column_scales;
        SumMatrix column_sums;
        [[unroll]] for (uint k = 0u; k < BLOCK_DEPTHS; ++k)
            coopMatLoad(x[k], x_tile, column * LINE_PARTS + place + k * MATRIX_DEPTH / PART_SIZE, LINE_PARTS,
                        gl_CooperativeMatrixLayoutColumnMajor);
        LOAD_COLUMNS(column_scales, x_scales, block * TILE_COLUMNS + column);
#ifdef ADDS_MINS
        LOAD_COLUMNS(column_sums, x_sums, block * TILE_COLUMNS + column);
#endif
        [[unroll]] for (uint r = 0u; r < ROW_MATRICES; ++r) {
            DotMatrix dots = DotMatrix(0);
            [[unroll]] for (uint k = 0u; k < BLOCK_DEPTHS; ++k) dots = coopMatMulAdd(w[r * BLOCK_DEPTHS + k], x[k], dots);
            const uint i = c * ROW_MATRICES + r;
            sums[i] = sums[i] + SumMatrix(dots) * (row_scales[r] * column_scales);
#ifdef ADDS_MINS
            sums[i] = sums[i] + row_mins[r] * column_sums;
#endif
        }
    }
}

void turn_sums() {
    const SumMatrix first = sums[0];
    [[unroll]] for (uint i = 1u; i < N_MATRICES; ++i) sums[i - 1u] = sums[i];
    sums[N_MATRICES - 1u] = first;
}

void store_sums(uint n_rows, uint n_columns) {
    const uint staging = gl_SubgroupID * MATRIX_SIZE;
    [[dont_unroll]] for (uint m = 0u; m < N_MATRICES; ++m) {
        share_in_subgroup();
        coopMatStore(sums[0], staged, staging, MATRIX_ROWS, gl_CooperativeMatrixLayoutColumnMajor);
        turn_sums();
        share_in_subgroup();
        for (uint i = gl_SubgroupInvocationID * N_PARTS; i < MATRIX_SIZE; i += SUBGROUP_SIZE * N_PARTS) {
            const uint dot = team_dot() + m % ROW_MATRICES * MATRIX_ROWS + i % MATRIX_ROWS;
            const uint column = team_column() + m / ROW_MATRICES * MATRIX_COLUMNS + i / MATRIX_ROWS;
            const uint row = gl_WorkGroupID.y * TILE_ROWS + dot / N_PARTS;
            float products[N_PARTS];
            [[unroll]] for (uint p = 0u; p < N_PARTS; ++p) products[p] = staged[staging + i + p];
            if (row < n_rows && column < n_columns) store_products(row, column, products);
        }
    }
}

void multiply_tile(uint n_rows, uint n_columns, uint n_blocks) {
    const WeightRow row = tile_row(gl_LocalInvocationIndex);
    uint x_starts[LANE_SLICES], head_starts[LANE_HEADS];
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        const uint slice = brought_slice(i) % STEP_SLICES;
        x_starts[i] = column_x(min(brought_slice(i) / STEP_SLICES, n_columns - 1u)) + slice / 2u * BLOCK_WORDS4 + slice % 2u;
    }
    [[unroll]] for (uint i = 0u; i < LANE_HEADS; ++i) {
        const uint column = brought_head(i) % TILE_COLUMNS, block = brought_head(i) / TILE_COLUMNS;
        head_starts[i] = column_x(min(column, n_columns - 1u)) + block * BLOCK_WORDS4 + 2u;
    }
    const uint n_steps = n_blocks * BLOCK_CHUNKS / 2u;
    [[unroll]] for (uint i = 0u; i < N_MATRICES; ++i) sums[i] = SumMatrix(0.0);
    StepInput loaded;
    if (LOADS_AHEAD != 0u) load_step(row, x_starts, head_starts, n_blocks, 0u, loaded);
    [[dont_unroll]] for (uint step_index = 0u; step_index < n_steps; ++step_index) {
        if (LOADS_AHEAD == 0u) load_step(row, x_starts, head_starts, n_blocks, step_index, loaded);
        share(); // the last step's tile has been read
        store_step(loaded, step_index);
        share();
        if (LOADS_AHEAD != 0u && step_index + 1u < n_steps) load_step(row, x_starts, head_starts, n_blocks, step_index + 1u, loaded);
        if (LOADS_AHEAD != 0u) {
            [[unroll]] for (uint block = 0u; block < STEP_BLOCKS; ++block) add_block(block);
        } else { // a loop takes fewer registers
            [[dont_unroll]] for (uint block = 0u; block < STEP_BLOCKS; ++block) add_block(block);
        }
    }
    store_sums(n_rows, n_columns);
}
