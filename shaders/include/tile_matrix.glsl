// The mapping of tile.glsl for GPUs with matrix units (VK_KHR_cooperative_matrix): a workgroup walks along its tile chunk by
// chunk. Every lane unpacks one chunk of its own row into shared memory and brings its share of x, both as f16. A subgroup has
// the sums of LANE_DOTS rows by LANE_COLUMNS columns, in f32 matrices; it multiplies them by matrices from shared memory.
//
// Rows and columns are divided by units, powers of two, before they become f16. A unit brings the largest number of the first
// chunk to 16 or more, below 32. Where a later chunk has one of 2^15 or more, the largest of all chunks counts in its place,
// and the products begin anew, once at most. So nothing overflows, what is too small for f16 is below 2^-18 of the row's or
// column's largest number, and a unit depends on its own row or column alone. vkmoe/kernels/matmul/twins.py bounds the error.
#include "matrix_units.glsl"

const uint TILE_DOTS = gl_WorkGroupSize.x;
const uint TILE_ROWS = TILE_DOTS / N_PARTS;
const uint DOT_TEAMS = TILE_DOTS / LANE_DOTS;  // subgroups that share columns
const uint ROW_MATRICES = LANE_DOTS / MATRIX_ROWS;
const uint COLUMN_MATRICES = LANE_COLUMNS / MATRIX_COLUMNS;
const uint FEW_MATRICES = COLUMN_MATRICES < 4u ? COLUMN_MATRICES : COLUMN_MATRICES / 2u;  // that tiles of few columns multiply
const uint N_MATRICES = ROW_MATRICES * COLUMN_MATRICES;
const uint MATRIX_SIZE = MATRIX_ROWS * MATRIX_COLUMNS;

// A chunk of a row or column stands in shared memory in slices of 16 bytes, and one that is empty: eight lines cover all banks.
const uint CHUNK_SLICES = 4u;
const uint LINE_SLICES = CHUNK_SLICES + 1u;
const uint MATRIX_SLICES = MATRIX_DEPTH / 8u;  // of a row of a matrix
const uint LANE_SLICES = (TILE_COLUMNS * CHUNK_SLICES + TILE_DOTS - 1u) / TILE_DOTS;  // of x that a lane brings
const uint SLICE_VEC4S = 2u;

shared uvec4 w_tile[TILE_DOTS * LINE_SLICES];
shared uvec4 x_tile[TILE_COLUMNS * LINE_SLICES];
shared float staged[TILE_DOTS / SUBGROUP_SIZE * MATRIX_SIZE];  // a matrix of each subgroup
shared float w_units[TILE_DOTS], x_units[TILE_COLUMNS];
shared uint x_peaks[TILE_COLUMNS];  // the bits of floats
shared uint is_raised[2];           // whether a unit must be, in even and in odd steps

#define SumMatrix coopmat<float, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_COLUMNS, gl_MatrixUseAccumulator>
#define WeightMatrix coopmat<float16_t, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_DEPTH, gl_MatrixUseA>
#define InputMatrix coopmat<float16_t, gl_ScopeSubgroup, MATRIX_DEPTH, MATRIX_COLUMNS, gl_MatrixUseB>

SumMatrix sums[N_MATRICES];

// ----- units -----

const float NO_UNIT = 0.0;  // in place of a unit's inverse, before the first chunk

#ifdef Q_BIAS
// Scales are f16 times less than 2^5: weights that are not 0 are above 2^-30, and what is below 2^22 stays finite.
const float LEAST_UNIT = 1.0 / 18446744073709551616.0;
#define W_INVERSE(inverse) 1.0
#else
#define W_INVERSE(inverse) inverse
#endif

// Whether a chunk with this peak needs a larger unit. None would do for what is infinite.
bool rises(float peak, float inverse) { return peak * inverse >= 32768.0 && floatBitsToUint(peak) < 0x7F800000u; }

// ----- steps -----

// Products of part 0 and part 1 of a row are neighbours.
WeightRow tile_row(uint d) { return part_row(d % N_PARTS, gl_WorkGroupID.y * TILE_ROWS + d / N_PARTS); }

// Which column's slices a lane brings. Where there are fewer than lanes, some bring the same.
uint brought_column(uint i) { return (gl_LocalInvocationIndex + i * TILE_DOTS) / CHUNK_SLICES & (TILE_COLUMNS - 1u); }
uint brought_slice() { return gl_LocalInvocationIndex % CHUNK_SLICES; }

// What a lane loads for a step.
struct StepInput {
    WeightChunk chunk;
    vec4 x[LANE_SLICES * SLICE_VEC4S];
};

void load_step(WeightRow row, uint x_starts[LANE_SLICES], uint n_blocks, uint step_index, out StepInput loaded) {
    const uint block = step_index / BLOCK_CHUNKS, t = step_index % BLOCK_CHUNKS;
    load_chunk(row, n_blocks, block, t, loaded.chunk);
    const uint at = chunk_vec4(block, t, brought_slice() * SLICE_VEC4S);
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        [[unroll]] for (uint k = 0u; k < SLICE_VEC4S; ++k) loaded.x[i * SLICE_VEC4S + k] = load_x(x_starts[i] + at + k);
    }
}

// Where this subgroup's first row and column are in the tile, and those of one of its matrices.
uint team_dot() { return gl_SubgroupID % DOT_TEAMS * LANE_DOTS; }
uint team_column() { return gl_SubgroupID / DOT_TEAMS * LANE_COLUMNS; }
uint matrix_dot(uint m) { return team_dot() + m % ROW_MATRICES * MATRIX_ROWS; }
uint matrix_column(uint m) { return team_column() + m / ROW_MATRICES * MATRIX_COLUMNS; }

// A row's new unit, and what its numbers in shared memory are to be multiplied by. Where weights are divided as they are
// unpacked, the peak counts in units too.
float raise_row(inout float w_peak, out float unit) {
#ifdef Q_BIAS
    w_peak *= inverse_of(w_inverse);
    unit = max(unit_of(w_peak), LEAST_UNIT);
    w_inverse = inverse_of(unit);
    w_peak *= w_inverse;
    return 1.0;
#else
    unit = unit_of(w_peak);
    return inverse_of(unit);
#endif
}

// Raises the units of rows and columns that have these peaks and need it, or of all.
void raise_units(inout float w_peak, float x_peak[LANE_SLICES], bool all, inout float row_inverse,
                 inout float x_inverses[LANE_SLICES]) {
    if (all || rises(w_peak, row_inverse)) {
        float unit;
        row_inverse = raise_row(w_peak, unit);
        w_units[gl_LocalInvocationIndex] = unit;
    }
    // Several lanes bring a column's chunk.
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) atomicMax(x_peaks[brought_column(i)], floatBitsToUint(x_peak[i]));
    share();
    is_raised[0] = 0u;
    is_raised[1] = 0u;
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        const uint column = brought_column(i);
        const float peak = uintBitsToFloat(x_peaks[column]);
        if (all || rises(peak, x_inverses[i])) {
            x_inverses[i] = inverse_of(unit_of(peak));
            x_units[column] = unit_of(peak);
        }
    }
    share();
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) x_peaks[brought_column(i)] = 0u;
}

// Adds the products of a step's 32 weights with the subgroup's first columns, so many matrices of them.
void add_step(const uint n_column_matrices) {
    [[unroll]] for (uint k = 0u; k < CHUNK_SLICES; k += MATRIX_SLICES) {
        WeightMatrix w[ROW_MATRICES];
        [[unroll]] for (uint r = 0u; r < ROW_MATRICES; ++r)
            coopMatLoad(w[r], w_tile, (team_dot() + r * MATRIX_ROWS) * LINE_SLICES + k, LINE_SLICES,
                        gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint c = 0u; c < n_column_matrices; ++c) {
            InputMatrix x;
            coopMatLoad(x, x_tile, (team_column() + c * MATRIX_COLUMNS) * LINE_SLICES + k, LINE_SLICES,
                        gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint r = 0u; r < ROW_MATRICES; ++r)
                sums[c * ROW_MATRICES + r] = coopMatMulAdd(w[r], x, sums[c * ROW_MATRICES + r]);
        }
    }
}

// The next matrix of sums comes to the front: registers have no index. After N_MATRICES turns all are where they were.
void turn_sums() {
    const SumMatrix first = sums[0];
    [[unroll]] for (uint i = 1u; i < N_MATRICES; ++i) sums[i - 1u] = sums[i];
    sums[N_MATRICES - 1u] = first;
}

void store_sums(uint n_rows, uint n_columns) {
    const uint staging = gl_SubgroupID * MATRIX_SIZE;
    [[dont_unroll]] for (uint m = 0u; m < N_MATRICES; ++m) {
        share_in_subgroup();  // what was staged before has been read
        coopMatStore(sums[0], staged, staging, MATRIX_ROWS, gl_CooperativeMatrixLayoutColumnMajor);
        turn_sums();
        share_in_subgroup();
        for (uint i = gl_SubgroupInvocationID * N_PARTS; i < MATRIX_SIZE; i += SUBGROUP_SIZE * N_PARTS) {
            const uint dot = matrix_dot(m) + i % MATRIX_ROWS, column = matrix_column(m) + i / MATRIX_ROWS;
            const uint row = gl_WorkGroupID.y * TILE_ROWS + dot / N_PARTS;
            float products[N_PARTS];
            [[unroll]] for (uint p = 0u; p < N_PARTS; ++p) {
                precise float product = staged[staging + i + p] * (w_units[dot + p] * x_units[column]);
                products[p] = product;
            }
            if (row < n_rows && column < n_columns) store_products(row, column, products);
        }
    }
}

// Unpacks a step's weights, and adds its numbers to the peaks.
void unpack_step(StepInput loaded, uint step_index, out vec4 w[CHUNK_VEC4S], inout float w_peak, inout float x_peak[LANE_SLICES]) {
    unpack_weights(loaded.chunk, step_index / BLOCK_CHUNKS, step_index % BLOCK_CHUNKS, w);
    [[unroll]] for (uint i = 0u; i < CHUNK_VEC4S; ++i) w_peak = max(w_peak, peak_of(w[i]));
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        [[unroll]] for (uint k = 0u; k < SLICE_VEC4S; ++k) x_peak[i] = max(x_peak[i], peak_of(loaded.x[SLICE_VEC4S * i + k]));
    }
}

// The peaks of all steps from this one on.
void find_peaks(WeightRow row, uint x_starts[LANE_SLICES], uint n_blocks, uint step_index, inout float w_peak,
                inout float x_peak[LANE_SLICES]) {
    [[dont_unroll]] for (; step_index / BLOCK_CHUNKS < n_blocks; ++step_index) {
        StepInput loaded;
        vec4 w[CHUNK_VEC4S];
        load_step(row, x_starts, n_blocks, step_index, loaded);
        unpack_step(loaded, step_index, w, w_peak, x_peak);
    }
}

void multiply_tile(uint n_rows, uint n_columns, uint n_blocks) {
    const WeightRow row = tile_row(gl_LocalInvocationIndex);
    uint x_starts[LANE_SLICES];
    float row_inverse = NO_UNIT, x_inverses[LANE_SLICES];
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        x_starts[i] = column_x(min(brought_column(i), n_columns - 1u));
        x_inverses[i] = NO_UNIT;
        x_peaks[brought_column(i)] = 0u;
    }
    is_raised[0] = 1u;
#ifdef HAS_CODE_BOOK
    fill_code_book();
    share();
#endif
    const uint n_own = n_columns - min(n_columns, team_column());  // columns of this subgroup and behind it
    StepInput loaded;
    float w_peak = 0.0, x_peak[LANE_SLICES];  // of the chunks that were loaded, as far as this lane brings them
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) x_peak[i] = 0.0;
    [[dont_unroll]] for (;;) {
        [[unroll]] for (uint i = 0u; i < N_MATRICES; ++i) sums[i] = SumMatrix(0.0);
        if (LOADS_AHEAD != 0u) load_step(row, x_starts, n_blocks, 0u, loaded);
        uint step_index = 0u;
        [[dont_unroll]] for (; step_index / BLOCK_CHUNKS < n_blocks; ++step_index) {
            if (LOADS_AHEAD == 0u) load_step(row, x_starts, n_blocks, step_index, loaded);
            vec4 w[CHUNK_VEC4S];
            unpack_step(loaded, step_index, w, w_peak, x_peak);
            bool any_rises = rises(w_peak, row_inverse);
            [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) any_rises = any_rises || rises(x_peak[i], x_inverses[i]);
            if (any_rises) is_raised[step_index & 1u] = 1u;
            share();  // the last step's tile has been read
            if (is_raised[step_index & 1u] != 0u) break;
            is_raised[~step_index & 1u] = 0u;
            [[unroll]] for (uint i = 0u; i < CHUNK_SLICES; ++i)
                w_tile[gl_LocalInvocationIndex * LINE_SLICES + i] = slice_of(w[2u * i], w[2u * i + 1u], W_INVERSE(row_inverse));
            [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
                const uint place = brought_column(i) * LINE_SLICES + brought_slice();
                x_tile[place] = slice_of(loaded.x[2u * i], loaded.x[2u * i + 1u], x_inverses[i]);
            }
            share();
            // The last step is loaded once more: on a branch RADV copies what is loaded, and waits for it.
            if (LOADS_AHEAD != 0u) load_step(row, x_starts, n_blocks, min(step_index + 1u, n_blocks * BLOCK_CHUNKS - 1u), loaded);
            if (FEW_MATRICES < COLUMN_MATRICES && n_own > FEW_MATRICES * MATRIX_COLUMNS) {
                add_step(COLUMN_MATRICES);
            } else if (LOADS_AHEAD == 0u || n_own > 0u) {
                add_step(FEW_MATRICES);
            }
        }
        if (step_index / BLOCK_CHUNKS == n_blocks) break;
        const bool all = row_inverse == NO_UNIT;
        if (!all) find_peaks(row, x_starts, n_blocks, step_index + 1u, w_peak, x_peak);
        raise_units(w_peak, x_peak, all, row_inverse, x_inverses);
    }
    store_sums(n_rows, n_columns);  // its barriers are for all subgroups: lavapipe stops at others
}
