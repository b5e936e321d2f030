// Computes  y[row] = s * dot(W[row], x) + bias[row] for up to three matrices of one type stacked by rows (q, k and v in one
//           dispatch), s = 1 / sqrt(mean(h^2) + eps) when x is h * gain and n_partials > 0 (fused RMSNorm), else 1. For a stack
//           of heads y[head] = W[head] x[head], x[head] being x_stride behind that of the head before.
//           RESIDUAL: hidden[row] += that, gained[row] = hidden[row] * gain[row], one partial sum of hidden^2 a workgroup.
// Inputs    x f32 [32 * BLOCK_CHUNKS * n_blocks] a head, W by address, rows of row_bytes, a head's behind those of the head
//           before; norm_partials f32 [n_partials]; bias f32 by address, as long as y, or null.
// Who       workgroup -> ROWS rows of one head (z); its lanes share the columns (include/dot.glsl).
// Assumes   rows are 16-byte aligned; workgroup size is a multiple of 8; heads are of one matrix, so rows_end0 = n_rows.
// Dispatch  (x, y, n_heads) with x * y >= ceil(n_rows / ROWS): devices may take no more than 65535 workgroups in x.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1u;

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

WeightRow dot_row(uint r, uint slot) {
    const uint row = min(first_row + r, n_rows - 1u);
#ifdef RESIDUAL
    return address_add_product(weights, row, row_bytes);
#else
    if (row < rows_end0) return address_add_product(weights0, gl_WorkGroupID.z * n_rows + row, row_bytes);
    if (row < rows_end1) return address_add_product(weights1, row - rows_end0, row_bytes);
    return address_add_product(weights2, row - rows_end1, row_bytes);
#endif
}

vec4 activation4(uint slot, uint index4) { return x4[first_x + index4]; }
float slot_weight(uint slot) { return 1.0; }

#include "dot.glsl"

#ifdef RESIDUAL
float hidden_square = 0.0;  // this lane's part of the sum of hidden^2

void store_row(uint row, float value) {
    precise float added = value;
    if (!is_null(bias)) added += load_float(address_add(bias, row * 4u));
    const float updated = hidden[row] + added;
    hidden[row] = updated;
    gained[row] = updated * load_float(address_add(gain, row * 4u));
    hidden_square += updated * updated;
}
#else
float input_scale;

void store_row(uint row, float value) {
    const uint index = output_offset + gl_WorkGroupID.z * n_rows + row;
    precise float result = value * input_scale;
    if (!is_null(bias)) result += load_float(address_add(bias, index * 4u));
    y[index] = result;
}
#endif

void main() {
    const uint lane = gl_LocalInvocationIndex;
    const uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (group * ROWS >= n_rows) return; // the last y has more than it needs
#ifdef RESIDUAL
    first_x = 0u;
#else
    first_x = x_offset + gl_WorkGroupID.z * x_stride;
    input_scale = fused_rms_scale(n_partials, inverse_width, eps);
#endif
    first_row = group * ROWS;
    dot_rows(1u, n_blocks);
    for (uint r = lane; r < ROWS; r += gl_WorkGroupSize.x) {
        if (first_row + r < n_rows) store_row(first_row + r, dot_total(r));
    }
#ifdef RESIDUAL
    const float square = workgroup_sum(hidden_square);
    if (lane == 0u) partials_out[group] = square;
#endif
}
