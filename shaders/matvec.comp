// Computes  y[row] = s * dot(W[row], x) + bias[row] for up to three matrices of one type stacked by rows (q, k and v in one
//           dispatch), s = 1 / sqrt(mean(h^2) + eps) when x is h * gain and n_partials > 0 (fused RMSNorm), else 1. For a stack
//           of heads y[head] = W[head] x[head], x[head] being x_stride behind that of the head before.
//           RESIDUAL: hidden[row] += that, gained[row] = hidden[row] * gain[row], one partial sum of hidden^2 a workgroup.
// Inputs    x f32 [32 * BLOCK_CHUNKS * n_blocks] a head, W by address, rows of row_bytes, a head's behind those of the head
//           before; norm_partials f32 [n_partials]; bias f32 by address, as long as y, or null.
// Who       workgroup -> ROWS rows of one head (z); its lanes share the columns (include/dot.glsl).
// Assumes   rows are 16-byte aligned; workgroup size is a multiple of 8, at least ROWS; heads are of one matrix, so
//           rows_end0 = n_rows.
// Dispatch  (x, y, n_heads) with x * y >= ceil(n_rows / ROWS): devices may take no more than 65535 workgroups in x.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1u;
layout(constant_id = 2) const uint LOADED_WORDS = 16u;

layout(set = 0, binding = 0, std430) readonly buffer Input { vec4 x4[]; };
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
    uint x_stride;          // from head to head, in vec4
    uint n_partials;
    float inverse_width;    // 1 / length of x
    float eps;
#endif
};

#include "reduce.glsl"
#ifndef RESIDUAL
#include "rms.glsl"
#endif

uint first_row;
uint first_x; // in vec4

#define N_DOTS ROWS
#ifdef RESIDUAL
#define N_SUMS ROWS
#else
const uint N_SUMS = ROWS + 1u; // the last is that of the norm
#endif
#include "sums.glsl"

#ifdef RESIDUAL
WeightRow slot_matrix(uint slot) { return to_address(weights); }

WeightRow dot_row(WeightRow matrix, uint r) { return matrix_row(matrix, first_row + r, n_rows, row_bytes); }
#else
WeightRow slot_matrix(uint slot) { return to_address(weights0); }

// By selection, between variables: a branch would keep the loads of the next row waiting.
WeightRow dot_row(WeightRow matrix, uint r) {
    const uvec2 start0 = weights0, start1 = weights1, start2 = weights2;
    const uint end0 = rows_end0, end1 = rows_end1;
    const uint row = min(first_row + r, n_rows - 1u);
    const bool is_first = row < end0, is_second = row < end1;
    const uvec2 behind_first = is_second ? start1 : start2;
    const uint before = is_second ? end0 : end1;
    const uint of_head = gl_WorkGroupID.z * n_rows + row, of_later = row - before;
    return address_add_product(to_address(is_first ? start0 : behind_first), is_first ? of_head : of_later, row_bytes);
}
#endif

vec4 activation4(uint slot, uint index4) { return x4[first_x + index4]; }
float slot_weight(uint slot) { return 1.0; }

#include "dot.glsl"

#ifdef RESIDUAL
// Returns the row's hidden^2.
float store_row(uint row, float value, float old_hidden, float row_gain, float row_bias) {
    precise float added = value;
    if (!is_null(bias)) added += row_bias;
    const float updated = old_hidden + added;
    hidden[row] = updated;
    gained[row] = updated * row_gain;
    return updated * updated;
}
#else
void store_row(uint row, float value, float scale, float row_bias) {
    precise float result = value * scale;
    if (!is_null(bias)) result += row_bias;
    y[output_offset + gl_WorkGroupID.z * n_rows + row] = result;
}
#endif

// Bias `index`, if there are any.
float bias_at(uint index) { return is_null(bias) ? 0.0 : load_float(address_add(bias, index * 4u)); }

void main() {
    const uint lane = gl_LocalInvocationIndex;
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (group * ROWS >= n_rows) return; // the last y has more than it needs
    first_row = group * ROWS;
    const uint row = first_row + lane; // that this lane stores, if it is one
    const uint loaded_row = min(row, n_rows - 1u);
    const bool stores = lane < ROWS && row < n_rows;
    float sums[N_SUMS];
    // Whatever the end needs is loaded before the weights, not behind them.
#ifdef RESIDUAL
    first_x = 0u;
    const float old_hidden = hidden[loaded_row], row_bias = bias_at(loaded_row);
    const float row_gain = load_float(address_add(gain, loaded_row * 4u));
    dot_rows(1u, n_blocks, sums);
    reduce_sums(sums);
    const float square = workgroup_sum(stores ? store_row(row, sum_total(lane), old_hidden, row_gain, row_bias) : 0.0);
    if (lane == 0u) partials_out[group] = square;
#else
    first_x = x_offset + gl_WorkGroupID.z * x_stride;
    const float row_bias = bias_at(output_offset + gl_WorkGroupID.z * n_rows + loaded_row);
    const NormPartials partials = load_norm_partials(n_partials);
    dot_rows(1u, n_blocks, sums);
    sums[ROWS] = norm_part(partials, n_partials);
    reduce_sums(sums);
    const float scale = rms_scale(sum_total(ROWS), n_partials, inverse_width, eps);
    if (stores) store_row(row, sum_total(lane), scale, row_bias);
#endif
}
