// Computes  hidden[row] += sum over ranks of weight[row][rank] * expert_out[pair], pair = row * N_USED + rank, and if SHARED
//           then hidden[row] += weight * shared_out[row], the weight being a word of the routing, or 1. With `picks`
//           that is done for the rows that want logits alone; if not ADDS, hidden becomes the sum.
// Inputs    expert_out f32 [n_rows * N_USED][4 * row_vec4s]; shared_out f32 [n_rows][4 * row_vec4s], read if SHARED; routing, of
//           which the first words of each row_words are the row's N_USED ids, then their weights; params; hidden f32
//           [n_rows][4 * row_vec4s]; done, by the id of an expert.
// Who       an invocation takes four values of a row; ranks are summed in rising order, the sum is added to hidden.
// Assumes   expert_out has what all pairs of rows below params.n_rows left there: a pair whose expert is not done gives NaN, as
//           old numbers would be taken for an answer; with PARTIAL it gives nothing: another device computes it. Rows from
//           params.n_rows on are left as they are.
// Dispatch  (ceil(row_vec4s / workgroup size), rows of the program, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#define PARAMS_BINDING 3
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint N_USED = 8u;
layout(constant_id = 2) const uint SHARED = 0u;
layout(constant_id = 3) const uint PARTIAL = 0u;
layout(constant_id = 4) const uint ADDS = 1u; // to what hidden holds; else that is not read

layout(set = 0, binding = 0, std430) readonly buffer ExpertOut { vec4 expert_out4[]; };
layout(set = 0, binding = 1, std430) readonly buffer SharedOut { vec4 shared_out4[]; };
layout(set = 0, binding = 2, std430) readonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 4, std430) buffer Hidden { vec4 hidden4[]; };
layout(set = 0, binding = 5, std430) readonly buffer Done { uint done[]; };
layout(push_constant, std430) uniform Push {
    uint row_vec4s;
    uint row_words;      // of `routing`
    uint weight_word;    // of a row of it, the shared expert's weight; NO_WORD: 1
    uint picks;
};

const uint NO_WORD = 0xFFFFFFFFu;
const uint NOT_A_NUMBER = 0x7FC00000u;

void main() {
    const uint numbered = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (numbered >= (picks != 0u ? params.n_picked : params.n_rows) || i >= row_vec4s) return;
    const uint row = picks != 0u ? params.rows[numbered].picked : numbered;
    const uint at = row * row_vec4s + i, first_word = row * row_words;
    precise vec4 sum = vec4(0.0);
    for (uint rank = 0u; rank < N_USED; ++rank) {
        const bool is_done = done[routing[first_word + rank]] != 0u;
        const float weight = uintBitsToFloat(is_done ? routing[first_word + N_USED + rank] : NOT_A_NUMBER);
        const vec4 added = fma(vec4(weight), expert_out4[(row * N_USED + rank) * row_vec4s + i], sum);
        sum = PARTIAL != 0u && !is_done ? sum : added;
    }
    precise vec4 updated = sum;
    if (ADDS != 0u) updated = hidden4[at] + sum;
    if (SHARED != 0u) {
        const uint word = weight_word == NO_WORD ? 0u : weight_word;
        const float weight = weight_word == NO_WORD ? 1.0 : uintBitsToFloat(routing[first_word + word]);
        updated = fma(vec4(weight), shared_out4[at], updated);
    }
    hidden4[at] = updated;
}
