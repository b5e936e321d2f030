// Computes  for each row of a batch out_h[d] = sum over splits s of f_s * sum_s[d] / (sum over s of f_s * total_s + e^(sink_h -
//           max)), f_s = e^(max_s - max). The last term only with sinks (gpt-oss): a learnt logit per head, to which no value
//           belongs.
// Inputs    partials f32 [N_HEADS][N_SPLITS][HEAD_DIM + 2] (sums, maximum, total of weights) of attention.comp or, HEAD_DIM
//           being KV_RANK, of latent_attention.comp; params; by address sinks f32 [N_HEADS] (null = none). Output: out f32
//           [N_HEADS * HEAD_DIM]. Rows lie a pitch behind one another.
// Who       one workgroup per head and row (z), one dim per invocation in turn; the splits' factors are computed once into
//           shared memory.
// Assumes   at most MAX_SPLITS splits. Splits beyond the position hold old data and are not read. `window` is that of the
//           attention before it. A sink of -infinity is none.
// Dispatch  (N_HEADS, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.z
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint N_SPLITS = 1u;

layout(set = 0, binding = 0, std430) readonly buffer Partials { float partials[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Out { float out_heads[]; };
layout(push_constant, std430) uniform Push {
    uvec2 sinks;
    uint context;
    uint window;
    uint partials_pitch;    // from row to row
    uint out_pitch;
};

#include "attention_split.glsl"

const uint MAX_SPLITS = 128u;
const uint PIECE = N_SPLITS < 8u ? N_SPLITS : 8u; // splits whose loads do not wait for each other
const uint SPLIT_WORDS = HEAD_DIM + 2u;
shared float factor[MAX_SPLITS]; // at first the maximum; at last 0 beyond the splits in use
shared float split_total[MAX_SPLITS];
const float LARGEST = 3.0e38; // so that infinite sinks leave no NaN

// The sum over the splits of dim `d`, in their order; `first` is the word at which the head's partials begin.
float dim_sum(uint first, uint d, uint n_used_splits) {
    float sum = 0.0;
    for (uint begin = 0u; begin < n_used_splits; begin += PIECE) {
        float values[PIECE];
        [[unroll]] for (uint i = 0u; i < PIECE; ++i) {
            values[i] = partials[first + min(begin + i, n_used_splits - 1u) * SPLIT_WORDS + d];
        }
        [[unroll]] for (uint i = 0u; i < PIECE; ++i) {
            sum += factor[begin + i] * values[i];
        }
    }
    return sum;
}

void main() {
    if (ROW >= params.n_rows) return;
    const uint position = current_position(context);
    const uint last = position - first_seen(position, window);
    const uint n_used_splits = last / split_positions(last) + 1u;
    const uint first = ROW * partials_pitch + gl_WorkGroupID.x * N_SPLITS * SPLIT_WORDS;
    const uint first_out = ROW * out_pitch + gl_WorkGroupID.x * HEAD_DIM;
    const bool has_sink = !is_null(sinks);
    float sink = 0.0;
    if (has_sink) sink = clamp(load_float(address_add(sinks, gl_WorkGroupID.x * 4u)), -LARGEST, LARGEST);

    for (uint s = gl_LocalInvocationIndex; s < n_used_splits; s += gl_WorkGroupSize.x) {
        factor[s] = partials[first + s * SPLIT_WORDS + HEAD_DIM];
        split_total[s] = partials[first + s * SPLIT_WORDS + HEAD_DIM + 1u];
    }
    barrier();
    float top = factor[0];
    for (uint s = 1u; s < n_used_splits; ++s) top = max(top, factor[s]);
    if (has_sink) top = max(top, sink);
    barrier(); // the maxima have been read
    for (uint s = gl_LocalInvocationIndex; s < n_used_splits + PIECE; s += gl_WorkGroupSize.x) {
        if (s < MAX_SPLITS) factor[s] = s < n_used_splits ? exp(factor[s] - top) : 0.0;
    }
    barrier();
    float total = 0.0;
    for (uint s = 0u; s < n_used_splits; ++s) total += factor[s] * split_total[s];
    if (has_sink) total += exp(sink - top);
    const float inverse_total = 1.0 / total;

    for (uint d = gl_LocalInvocationIndex; d < HEAD_DIM; d += gl_WorkGroupSize.x) {
        out_heads[first_out + d] = dim_sum(first, d, n_used_splits) * inverse_total;
    }
}
