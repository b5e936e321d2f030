// The mapping of tile.glsl for GPUs: a workgroup walks along its tile chunk by chunk. Every lane unpacks one chunk of its own row
// into shared memory and brings its share of x, then multiplies LANE_DOTS rows by LANE_COLUMNS columns from there. What the next
// step needs is loaded meanwhile. A tile of few columns has them spread over lanes: each then has one. HALF_TILES: in f16.
const uint TILE_DOTS = gl_WorkGroupSize.x;
const uint TILE_ROWS = TILE_DOTS / N_PARTS;
const uint COLUMN_LANES = TILE_COLUMNS / LANE_COLUMNS;  // that share rows
const uint DOT_LANES = TILE_DOTS / LANE_DOTS;           // that share columns
const uint N_SUMS = LANE_DOTS * LANE_COLUMNS;

// A chunk of a row or column stands in shared memory in slices of 16 bytes, which are loaded and stored at once.
#ifdef HALF_TILES
const uint SLICE_VEC4S = 2u;
#else
const uint SLICE_VEC4S = 1u;
#endif
const uint CHUNK_SLICES = CHUNK_VEC4S / SLICE_VEC4S;
const uint LANE_SLICES = (TILE_COLUMNS * CHUNK_SLICES + TILE_DOTS - 1u) / TILE_DOTS;  // of x that a lane brings
const uint LANE_X = LANE_SLICES * SLICE_VEC4S;

#ifdef HALF_TILES
#include "tile_half.glsl"
#else
#define Slice vec4
#define Run float  // the sum that a chunk's products are added to
#define OVER_SLICES [[dont_unroll]]

Slice slice_of(vec4 first, vec4 last) { return first; }

Run begin_run(float sum) { return sum; }
float end_run(Run run, float sum, uint dot, uint column) { return run; }

Run add_products(Slice w, Slice x, uint k, Run run) {
    precise float sum = fma(w[k], x[k], run);
    return sum;
}
#endif

shared Slice w_tile[TILE_DOTS * CHUNK_SLICES];
shared Slice x_tile[TILE_COLUMNS * CHUNK_SLICES];

// Rows that a lane has are LINES_APART in shared memory, its columns COLUMN_LANES; in all of them a slice stands at one place,
// which changes from lane to lane so that eight lanes cover all banks.
const uint LINES_APART = DOT_LANES * N_PARTS;
uint turned(uint line, uint slice) { return slice ^ (line * CHUNK_SLICES / 8u & (CHUNK_SLICES - 1u)); }
uint dot_place(uint dot, uint slice) { return dot * CHUNK_SLICES + turned(dot % LINES_APART / N_PARTS * N_PARTS, slice); }
uint column_place(uint column, uint slice) { return column * CHUNK_SLICES + turned(column % COLUMN_LANES, slice); }

// Products of part 0 and part 1 of a row are neighbours.
WeightRow tile_row(uint d) { return part_row(d % N_PARTS, gl_WorkGroupID.y * TILE_ROWS + d / N_PARTS); }

// Which row and which column of the tile a lane's are.
uint lane_dot(uint d) { return gl_LocalInvocationIndex / COLUMN_LANES * N_PARTS + d / N_PARTS * LINES_APART + d % N_PARTS; }
uint lane_column(uint c) { return c * COLUMN_LANES + gl_LocalInvocationIndex % COLUMN_LANES; }

// Which column's slices a lane brings. Where there are fewer than lanes, some bring the same.
uint brought_column(uint i) { return (gl_LocalInvocationIndex + i * TILE_DOTS) / CHUNK_SLICES & (TILE_COLUMNS - 1u); }
uint brought_slice() { return gl_LocalInvocationIndex % CHUNK_SLICES; }

// What a lane loads for a step.
struct StepInput {
    WeightChunk chunk;
    vec4 x[LANE_X];
};

void load_step(WeightRow row, uint x_starts[LANE_SLICES], uint n_blocks, uint step_index, out StepInput loaded) {
    const uint block = step_index / BLOCK_CHUNKS, t = step_index % BLOCK_CHUNKS;
    load_chunk(row, n_blocks, block, t, loaded.chunk);
    const uint at = chunk_vec4(block, t, brought_slice() * SLICE_VEC4S);
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        [[unroll]] for (uint k = 0u; k < SLICE_VEC4S; ++k) loaded.x[i * SLICE_VEC4S + k] = load_x(x_starts[i] + at + k);
    }
}

void store_step(StepInput loaded, uint step_index) {
    vec4 w[CHUNK_VEC4S];
    unpack_weights(loaded.chunk, step_index / BLOCK_CHUNKS, step_index % BLOCK_CHUNKS, w);
#ifdef HALF_TILES
    scale_weights(w);
    scale_x(loaded.x);
#endif
    [[unroll]] for (uint i = 0u; i < CHUNK_SLICES; ++i)
        w_tile[dot_place(gl_LocalInvocationIndex, i)] = slice_of(w[i * SLICE_VEC4S], w[(i + 1u) * SLICE_VEC4S - 1u]);
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        const Slice slice = slice_of(loaded.x[i * SLICE_VEC4S], loaded.x[(i + 1u) * SLICE_VEC4S - 1u]);
        x_tile[column_place(brought_column(i), brought_slice())] = slice;
    }
}

// Adds the products of a step's 32 weights with the lane's first n_columns columns, one after another.
void add_step(const uint n_columns, inout float sums[N_SUMS]) {
    Run runs[N_SUMS];
    [[unroll]] for (uint i = 0u; i < n_columns * LANE_DOTS; ++i) runs[i] = begin_run(sums[i]);
    OVER_SLICES for (uint slice = 0u; slice < CHUNK_SLICES; ++slice) {
        const uint w_place = dot_place(lane_dot(0u), slice), x_place = column_place(lane_column(0u), slice);
        Slice x[LANE_COLUMNS];
        [[unroll]] for (uint c = 0u; c < n_columns; ++c) x[c] = x_tile[x_place + c * COLUMN_LANES * CHUNK_SLICES];
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
            const Slice w = w_tile[w_place + (d / N_PARTS * LINES_APART + d % N_PARTS) * CHUNK_SLICES];
            [[unroll]] for (uint k = 0u; k < 4u; ++k) {
                [[unroll]] for (uint c = 0u; c < n_columns; ++c)
                    runs[c * LANE_DOTS + d] = add_products(w, x[c], k, runs[c * LANE_DOTS + d]);
            }
        }
    }
    [[unroll]] for (uint c = 0u; c < n_columns; ++c) {
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
            const uint i = c * LANE_DOTS + d;
            sums[i] = end_run(runs[i], sums[i], lane_dot(d), lane_column(c));
        }
    }
}

void store_sums(float sums[N_SUMS], uint n_rows, uint n_columns) {
    [[dont_unroll]] for (uint c = 0u; c < LANE_COLUMNS && lane_column(c) < n_columns; ++c) {
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; d += N_PARTS) {
            const uint row = gl_WorkGroupID.y * TILE_ROWS + lane_dot(d) / N_PARTS;
            float products[N_PARTS];
            [[unroll]] for (uint p = 0u; p < N_PARTS; ++p) products[p] = sums[d + p];
            if (row < n_rows) store_products(row, lane_column(c), products);
        }
        // Registers have no index: the next column's sums come to the front.
        [[unroll]] for (uint i = LANE_DOTS; i < N_SUMS; ++i) sums[i - LANE_DOTS] = sums[i];
    }
}

void multiply_tile(uint n_rows, uint n_columns, uint n_blocks) {
    const WeightRow row = tile_row(gl_LocalInvocationIndex);
    uint x_starts[LANE_SLICES];
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) x_starts[i] = column_x(min(brought_column(i), n_columns - 1u));
    float sums[N_SUMS];
    [[unroll]] for (uint i = 0u; i < N_SUMS; ++i) sums[i] = 0.0;
    StepInput loaded;
    load_step(row, x_starts, n_blocks, 0u, loaded);
#ifdef HAS_CODE_BOOK
    fill_code_book();
#endif
    const uint n_steps = n_blocks * BLOCK_CHUNKS;
    [[dont_unroll]] for (uint step_index = 0u; step_index < n_steps; ++step_index) {
#ifdef HALF_TILES
        note_peaks(loaded.x);
#endif
        barrier();  // the last step's tile has been read
        store_step(loaded, step_index);
        barrier();
        if (step_index + 1u < n_steps) load_step(row, x_starts, n_blocks, step_index + 1u, loaded);
        if (n_columns <= COLUMN_LANES) {
            add_step(1u, sums);
        } else {
            add_step(LANE_COLUMNS, sums);
        }
    }
    store_sums(sums, n_rows, n_columns);
}
