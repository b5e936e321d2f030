// The mapping of tile.glsl for GPUs: a workgroup walks along its tile chunk by chunk. Every lane unpacks one chunk of its own row
// into shared memory and brings its share of x, then multiplies LANE_DOTS rows by LANE_COLUMNS columns from there. What the next
// step needs is loaded meanwhile. A tile of few columns has them spread over lanes: each then has one.
const uint CHUNK_WEIGHTS = 4u * CHUNK_VEC4S;
const uint TILE_DOTS = gl_WorkGroupSize.x;
const uint TILE_ROWS = TILE_DOTS / N_PARTS;
const uint COLUMN_LANES = TILE_COLUMNS / LANE_COLUMNS;  // that share rows
const uint LANE_X = TILE_COLUMNS * CHUNK_VEC4S / gl_WorkGroupSize.x;  // vec4s of x that a lane brings
const uint N_SUMS = LANE_DOTS * LANE_COLUMNS;

shared float w_tile[CHUNK_WEIGHTS * TILE_DOTS];     // [weight][dot]
shared float x_tile[CHUNK_WEIGHTS * TILE_COLUMNS];  // [weight][place]

// A power of two, at least 4.
uint place_turn(uint vec4_index) { return (vec4_index * 4u) & (TILE_COLUMNS - 1u); }

// Where a column stands in x_tile: columns of one lane together, groups of them in an order that changes from vec4 to vec4, so
// that lanes which bring neighbouring vec4s of a column write to different banks.
uint column_place(uint column, uint vec4_index) {
    return ((column % COLUMN_LANES) * LANE_COLUMNS + column / COLUMN_LANES) ^ place_turn(vec4_index);
}

// Products of part 0 and part 1 of a row are neighbours.
WeightRow tile_row(uint d) { return part_row(d % N_PARTS, gl_WorkGroupID.x * TILE_ROWS + d / N_PARTS); }

// What a lane loads for a step.
struct StepInput {
    WeightChunk chunk;
    vec4 x[LANE_X];
};

void load_step(WeightRow row, uint x_starts[LANE_X], uint n_blocks, uint step_index, out StepInput loaded) {
    const uint block = step_index / BLOCK_CHUNKS, t = step_index % BLOCK_CHUNKS;
    load_chunk(row, n_blocks, block, t, loaded.chunk);
    const uint at = chunk_vec4(block, t, gl_LocalInvocationIndex % CHUNK_VEC4S);
    [[unroll]] for (uint i = 0u; i < LANE_X; ++i) loaded.x[i] = load_x(x_starts[i] + at);
}

// Which column's x a lane brings, of LANE_X.
uint brought_column(uint i) { return (gl_LocalInvocationIndex + i * gl_WorkGroupSize.x) / CHUNK_VEC4S; }

void store_step(StepInput loaded, uint step_index) {
    vec4 w[CHUNK_VEC4S];
    unpack_weights(loaded.chunk, step_index / BLOCK_CHUNKS, step_index % BLOCK_CHUNKS, w);
    [[unroll]] for (uint i = 0u; i < CHUNK_WEIGHTS; ++i) w_tile[i * TILE_DOTS + gl_LocalInvocationIndex] = w[i / 4u][i % 4u];
    const uint vec4_index = gl_LocalInvocationIndex % CHUNK_VEC4S;
    [[unroll]] for (uint i = 0u; i < LANE_X; ++i) {
        const uint place = column_place(brought_column(i), vec4_index);
        [[unroll]] for (uint k = 0u; k < 4u; ++k) x_tile[(4u * vec4_index + k) * TILE_COLUMNS + place] = loaded.x[i][k];
    }
}

// Adds the products of a step's 32 weights with the lane's first n_columns columns, one weight after another.
void add_step(const uint n_columns, inout float sums[N_SUMS]) {
    const uint first_dot = gl_LocalInvocationIndex / COLUMN_LANES * LANE_DOTS;
    const uint first_place = gl_LocalInvocationIndex % COLUMN_LANES * LANE_COLUMNS;
    [[dont_unroll]] for (uint v = 0u; v < CHUNK_VEC4S; ++v) {
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            const uint weight = 4u * v + k;
            float w[LANE_DOTS];
            [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) w[d] = w_tile[weight * TILE_DOTS + first_dot + d];
            [[unroll]] for (uint c = 0u; c < n_columns; ++c) {
                const float x = x_tile[weight * TILE_COLUMNS + ((first_place + (c & ~3u)) ^ place_turn(v)) + (c & 3u)];
                [[unroll]] for (uint d = 0u; d < LANE_DOTS; ++d) {
                    precise float sum = fma(w[d], x, sums[c * LANE_DOTS + d]);
                    sums[c * LANE_DOTS + d] = sum;
                }
            }
        }
    }
}

void store_sums(float sums[N_SUMS], uint n_rows, uint n_columns) {
    const uint first_dot = gl_LocalInvocationIndex / COLUMN_LANES * LANE_DOTS;
    [[unroll]] for (uint c = 0u; c < LANE_COLUMNS; ++c) {
        const uint column = c * COLUMN_LANES + gl_LocalInvocationIndex % COLUMN_LANES;
        if (column >= n_columns) continue;
        [[unroll]] for (uint d = 0u; d < LANE_DOTS; d += N_PARTS) {
            const uint row = gl_WorkGroupID.x * TILE_ROWS + (first_dot + d) / N_PARTS;
            float products[N_PARTS];
            [[unroll]] for (uint p = 0u; p < N_PARTS; ++p) products[p] = sums[c * LANE_DOTS + d + p];
            if (row < n_rows) store_products(row, column, products);
        }
    }
}

void multiply_tile(uint n_rows, uint n_columns, uint n_blocks) {
    const WeightRow row = tile_row(gl_LocalInvocationIndex);
    uint x_starts[LANE_X];
    [[unroll]] for (uint i = 0u; i < LANE_X; ++i) x_starts[i] = column_x(min(brought_column(i), n_columns - 1u));
    float sums[N_SUMS];
    [[unroll]] for (uint i = 0u; i < N_SUMS; ++i) sums[i] = 0.0;
    StepInput loaded;
    load_step(row, x_starts, n_blocks, 0u, loaded);
#ifdef HAS_CODE_BOOK
    fill_code_book();
#endif
    const uint n_steps = n_blocks * BLOCK_CHUNKS;
    [[dont_unroll]] for (uint step_index = 0u; step_index < n_steps; ++step_index) {
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
