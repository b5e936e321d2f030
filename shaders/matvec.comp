// Computes  y[row] = s * dot(W[row], x) + bias[row] for up to three matrices of one type stacked by rows (q, k and v in one
//           dispatch), s = 1 / sqrt(mean(h^2) + eps) when x is h * gain and n_partials > 0 (fused RMSNorm), else 1; for each
//           vector x, y and norm of a batch. For a stack of heads y[head] = W[head] x[head], x[head] being x_stride behind
//           that of the head before.
//           RESIDUAL: hidden[row] += that (= if not ADDS), gained[row] = hidden[row] * gain[row], one partial sum of hidden^2 a
//           workgroup.
// Inputs    x f32 [32 * BLOCK_CHUNKS * n_blocks] a head, W by address, rows of row_bytes, a head's behind those of the head
//           before; norm_partials f32 [n_partials]; bias f32 by address, as long as y, or null. Vectors of a batch lie a pitch
//           behind one another.
// Who       workgroup -> ROWS rows for COLUMNS vectors (z), those of one head (y) where there are heads; its lanes share the
//           columns of W (include/dot.glsl). With several vectors it goes over them for WALK_ROWS rows at a time: registers
//           hold the unpacked weights of as many. A vector's bits depend on none of this but ROWS, and not on its place.
// Assumes   rows are 16-byte aligned; workgroup size is a multiple of 8, at least ROWS, which is at most 4 * WALK_ROWS; heads
//           are of one matrix, so rows_end0 = n_rows, and not closer together than a vec4.
// Dispatch  (x, y, vectors / COLUMNS) with x * y >= ceil(n_rows / ROWS): devices may take no more than 65535 workgroups in x.
//           Heads: (ceil(n_rows / ROWS), n_heads, vectors / COLUMNS).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1u;
layout(constant_id = 2) const uint WALK_ROWS = 1u;
layout(constant_id = 3) const uint COLUMNS = 1u;
layout(constant_id = 4) const uint LOADED_WORDS = 16u;
#ifdef RESIDUAL
layout(constant_id = 5) const uint ADDS = 1u; // to what hidden holds; else that is not read
#endif

layout(set = 0, binding = 0, std430) readonly buffer Input { Words4Bound x4[]; };
#ifdef RESIDUAL
layout(set = 0, binding = 1, std430) buffer Hidden { float hidden[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Gained { float gained[]; };
layout(set = 0, binding = 3, std430) writeonly buffer PartialsOut { float partials_out[]; };
#else
layout(set = 0, binding = 1, std430) writeonly buffer Output { float y[]; };
layout(set = 0, binding = 2, std430) readonly buffer PartialsIn { float norm_partials[]; };
#endif

layout(push_constant, std430) uniform Push {
#ifdef RESIDUAL
    uvec2 weights;
    uvec2 gain;             // f32 [n_rows]; the gain of the norm that reads `gained` next
    uvec2 bias;             // f32 [n_rows]; null: none
    uint n_rows;
    uint row_bytes;
    uint n_blocks;
    uint x_pitch;           // from vector to vector, in vec4
    uint hidden_pitch;      // the same of hidden and gained, in words
    uint partials_pitch;
#else
    uvec2 weights0;
    uvec2 weights1;
    uvec2 weights2;
    uvec2 bias;             // f32, of word i of y; null: none
    uint rows_end0;         // rows [0, rows_end0) are of weights0, up to rows_end1 of weights1, up to n_rows of weights2
    uint rows_end1;
    uint n_rows;            // of a head
    uint row_bytes;
    uint n_blocks;
    uint output_offset;
    uint x_offset;          // of the first head's x, in vec4
    uint x_stride;          // from head to head, in vec4; 0: there are no heads
    uint x_pitch;           // from vector to vector, in vec4
    uint y_pitch;           // the same in words
    uint partials_pitch;
    uint n_partials;
    float inverse_width;    // 1 / width of the norm
    float eps;
#endif
#ifdef CODE_BOOK_WORDS
    uvec2 code_book;        // see include/types/code_book.glsl
#endif
};

#include "reduce.glsl"
#ifndef RESIDUAL
#include "rms.glsl"
#endif

uint walked_row; // the first of the walk
uint first_x; // in vec4

#define N_DOTS WALK_ROWS
#ifdef RESIDUAL
#define N_SUMS ROWS
#else
const uint N_SUMS = ROWS + 1u; // the last is that of the norm
#endif
#include "sums.glsl"

#ifdef RESIDUAL
WeightRow slot_matrix(uint slot) { return to_address(weights); }

WeightRow dot_row(WeightRow matrix, uint r) { return matrix_row(matrix, walked_row + r, n_rows, row_bytes); }
#else
uint head; // of this workgroup

WeightRow slot_matrix(uint slot) { return to_address(weights0); }

// By selection, between variables: a branch would keep the loads of the next row waiting.
WeightRow dot_row(WeightRow matrix, uint r) {
    const uvec2 start0 = weights0, start1 = weights1, start2 = weights2;
    const uint end0 = rows_end0, end1 = rows_end1;
    const uint row = min(walked_row + r, n_rows - 1u);
    const bool is_first = row < end0, is_second = row < end1;
    const uvec2 behind_first = is_second ? start1 : start2;
    const uint before = is_second ? end0 : end1;
    const uint of_head = head * n_rows + row, of_later = row - before;
    return address_add_product(to_address(is_first ? start0 : behind_first), is_first ? of_head : of_later, row_bytes);
}
#endif

vec4 activation4(uint slot, uint column, uint index4) { return bound_vec4(x4[first_x + column * x_pitch + index4]); }
float slot_weight(uint slot) { return 1.0; }

#include "dot.glsl"

// Bias `index`, if there are any.
float bias_at(uint index) { return is_null(bias) ? 0.0 : load_float(address_add(bias, index * 4u)); }

float dots[COLUMNS * ROWS]; // this lane's parts

// Rows [first, first + WALK_ROWS) of this workgroup; those beyond ROWS, if they are no divisor of it, once more.
void walk(uint first) {
    float walked[N_PRODUCTS];
    dot_rows(1u, n_blocks, walked);
    [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
        [[unroll]] for (uint r = 0u; r < WALK_ROWS; ++r) {
            if (first + r < ROWS) dots[c * ROWS + first + r] = walked[c * WALK_ROWS + r];
        }
    }
}

// The part of a column in the sums that are reduced at once.
#define COLUMN_SUMS(column, sums) [[unroll]] for (uint r = 0u; r < ROWS; ++r) sums[r] = dots[column * ROWS + r];

// Neither is a loop: one with loops in it stays rolled, and would keep the dot products in memory.
#define WALK(i) \
    if (ROWS > i * WALK_ROWS) { \
        walked_row = first_row + i * WALK_ROWS; \
        walk(i * WALK_ROWS); \
    }
#define WALKS WALK(0u) WALK(1u) WALK(2u) WALK(3u)
#define EACH_COLUMN(finish) finish(0u) finish(1u) finish(2u) finish(3u) finish(4u) finish(5u) finish(6u) finish(7u)

uint group, lane;
uint row; // that this lane stores, if `stores`
bool stores;
float row_bias;
#ifdef RESIDUAL
float row_gain;
float old_hidden[COLUMNS];

// Returns the row's hidden^2.
float store_row(uint at, float value, float old) {
    precise float added = value;
    if (!is_null(bias)) added += row_bias;
    precise float updated = ADDS != 0u ? old + added : added;
    precise float square = updated * updated;
    hidden[at] = updated;
    gained[at] = updated * row_gain;
    return square;
}

void finish_column(uint column, uint vector) {
    float sums[N_SUMS];
    COLUMN_SUMS(column, sums)
    reduce_sums(sums);
    const float square = workgroup_sum(stores ? store_row(vector * hidden_pitch + row, sum_total(lane), old_hidden[column]) : 0.0);
    if (lane == 0u) partials_out[vector * partials_pitch + group] = square;
}
#else
uint first_y;

void store_row(uint at, float value, float scale) {
    precise float result = value * scale;
    if (!is_null(bias)) result += row_bias;
    y[at] = result;
}

void finish_column(uint column, uint vector, NormPartials partials) {
    float sums[N_SUMS];
    COLUMN_SUMS(column, sums)
    sums[ROWS] = norm_part(partials, vector * partials_pitch, n_partials);
    reduce_sums(sums);
    const float scale = rms_scale(sum_total(ROWS), n_partials, inverse_width, eps);
    if (stores) store_row(vector * y_pitch + first_y + row, sum_total(lane), scale);
}
#endif

void main() {
    lane = gl_LocalInvocationIndex;
#ifdef RESIDUAL
    group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
#else
    const bool has_heads = x_stride != 0u;
    group = (has_heads ? 0u : gl_WorkGroupID.y * gl_NumWorkGroups.x) + gl_WorkGroupID.x;
#endif
    if (group * ROWS >= n_rows) return; // the last y has more than it needs
    const uint first_row = group * ROWS, first_vector = gl_WorkGroupID.z * COLUMNS;
    row = first_row + lane;
    stores = lane < ROWS && row < n_rows;
    const uint loaded_row = min(row, n_rows - 1u);
    prepare_dots();
    // Whatever the end needs is loaded before the weights, not behind them.
#ifdef RESIDUAL
    first_x = first_vector * x_pitch;
    row_bias = bias_at(loaded_row);
    row_gain = load_float(address_add(gain, loaded_row * 4u));
    [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
        if (ADDS != 0u) old_hidden[c] = hidden[(first_vector + c) * hidden_pitch + loaded_row];
    }
#define FINISH(c) \
    if (COLUMNS > c) { \
        if (c > 0u) sums_are_read(); \
        finish_column(c, first_vector + c); \
    }
#else
    head = has_heads ? gl_WorkGroupID.y : 0u;
    first_y = output_offset + head * n_rows;
    first_x = x_offset + head * x_stride + first_vector * x_pitch;
    row_bias = bias_at(first_y + loaded_row);
    NormPartials partials = load_norm_partials(first_vector * partials_pitch, n_partials);
#define FINISH(c) \
    if (COLUMNS > c) { \
        if (c > 0u) sums_are_read(); \
        if (c > 0u) partials = load_norm_partials((first_vector + c) * partials_pitch, n_partials); \
        finish_column(c, first_vector + c, partials); \
    }
#endif
    WALKS
    EACH_COLUMN(FINISH)
}
