// Computes  for each row of a batch what the gated delta rule reads (Yang et al. 2024, arXiv:2412.06464; as Qwen3-Next has it):
//           c_t = silu(sum over j < N_TAPS of taps[j] * x_{t-N_TAPS+1+j}) in each channel; q and k = c / sqrt(sum c^2 + eps) in each
//           head, q also / sqrt(HEAD_DIM); v = c; of each head of v decay = exp(scale * softplus(a + bias)) and
//           beta = 1 / (1 + exp(-b)).
// Inputs    projected f32 rows [q N_KEY_HEADS * HEAD_DIM | k the same | v N_HEADS * HEAD_DIM | ...], b [N_HEADS] from word
//           beta_offset of a row on, a [N_HEADS] from alpha_offset on; params; by address taps f32 [channels][N_TAPS], the oldest
//           first, scales and biases f32 [N_HEADS], and the ring f32 [regions][RING_ROWS][channels] of rows before the batch.
//           Output: rows [q | k | v | decay N_HEADS | beta N_HEADS].
// Who       a workgroup takes a head of q, k or v of a row.
// Assumes   a row at position 0 has nothing before it. Modes: WHOLE also puts the row into the ring, which holds for 8 rows at
//           most; of more rows there are two dispatches, READ and STORE.
// Dispatch  (2 N_KEY_HEADS + N_HEADS, rows, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.y
#include "params.glsl"
#include "store.glsl"
#include "recurrent.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint N_KEY_HEADS = 16u;
layout(constant_id = 3) const uint N_HEADS = 32u;
layout(constant_id = 4) const uint N_TAPS = 4u;

layout(set = 0, binding = 0, std430) readonly buffer Projected { float projected[]; };
layout(set = 0, binding = 2, std430) buffer Mixed { float mixed[]; };
layout(push_constant, std430) uniform Push {
    uvec2 taps;
    uvec2 scales;
    uvec2 biases;
    uvec2 ring;
    uint n_regions;
    uint beta_offset;
    uint alpha_offset;
    uint projected_pitch; // from row to row
    uint mixed_pitch;
    uint mode;
};

#include "reduce.glsl"

const uint WHOLE = 0u, READ = 1u, STORE = 2u;
const uint N_CHANNELS = (2u * N_KEY_HEADS + N_HEADS) * HEAD_DIM;
const float EPS = 1e-6; // as the model's authors have it: a constant, not the epsilon of norms

uvec2 ring_place(uint position, uint channel) {
    const uint region = min(sequence_of(ROW), n_regions - 1u);
    return address_add(ring, ((region * RING_ROWS + position % RING_ROWS) * N_CHANNELS + channel) * 4u);
}

// What was projected for a channel, some rows before this one.
float earlier(uint n_before, uint channel) {
    if (n_before > position_of(ROW)) return 0.0;
    if (n_before <= ROW && continues(ROW - n_before, sequence_of(ROW)))
        return projected[(ROW - n_before) * projected_pitch + channel];
    return load_float(ring_place(position_of(ROW) - n_before, channel));
}

float convolved(uint channel) {
    float sum = 0.0;
    for (uint j = 0u; j < N_TAPS; ++j)
        sum = fma(load_float(address_add(taps, (channel * N_TAPS + j) * 4u)), earlier(N_TAPS - 1u - j, channel), sum);
    return sum / (1.0 + exp(-sum));
}

float softplus(float x) { return max(x, 0.0) + log(1.0 + exp(-abs(x))); }

void store_gates(uint head) {
    const uint row = ROW * projected_pitch, behind = ROW * mixed_pitch + N_CHANNELS + head;
    const float a = projected[row + alpha_offset + head] + load_float(address_add(biases, head * 4u));
    mixed[behind] = exp(load_float(address_add(scales, head * 4u)) * softplus(a));
    mixed[behind + N_HEADS] = 1.0 / (1.0 + exp(-projected[row + beta_offset + head]));
}

void main() {
    if (ROW >= params.n_rows) return;
    const uint head = gl_WorkGroupID.x, lane = gl_LocalInvocationIndex, n_lanes = gl_WorkGroupSize.x;
    if (mode == STORE && continues(ROW + RING_ROWS, sequence_of(ROW))) return; // a later row has this place
    if (mode != READ) {
        for (uint d = lane; d < HEAD_DIM; d += n_lanes) {
            const uint channel = head * HEAD_DIM + d;
            store_kept(ring_place(position_of(ROW), channel), projected[ROW * projected_pitch + channel]);
        }
    }
    if (mode == STORE) return;
    const bool is_query = head < N_KEY_HEADS, is_value = head >= 2u * N_KEY_HEADS;
    const uint first = ROW * mixed_pitch + head * HEAD_DIM;
    float squares = 0.0;
    for (uint d = lane; d < HEAD_DIM; d += n_lanes) {
        const float value = convolved(head * HEAD_DIM + d);
        mixed[first + d] = value;
        squares = fma(value, value, squares);
    }
    if (is_value) {
        if (lane == 0u) store_gates(head - 2u * N_KEY_HEADS);
        return;
    }
    const float factor = (is_query ? inversesqrt(float(HEAD_DIM)) : 1.0) / sqrt(workgroup_sum(squares) + EPS);
    for (uint d = lane; d < HEAD_DIM; d += n_lanes) mixed[first + d] *= factor;
}
