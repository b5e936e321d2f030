// Computes  act[slot][row] = f(s * dot(gate[row], x) + gate_bias[row], s * dot(up[row], x) + up_bias[row]) for each used expert
//           of each row of a batch; s is the fused RMSNorm scale. ACTIVATION 0: f(g, u) = silu(g) * u, silu(v) = v / (1 +
//           exp(-v)). ACTIVATION 1 (gpt-oss): f(g, u) = g / (1 + exp(-1.702 g)) * (u + 1) of g = min(g, 7), u = clamp(u, -7,
//           7). ACTIVATION 2 (GEGLU, Shazeer 2020, arXiv:2002.05202): f(g, u) = gelu(g) * u, gelu(v) = v / 2 * (1 + tanh(sqrt(2 /
//           pi) (v + 0.044715 v^3))) (Hendrycks & Gimpel 2016, arXiv:1606.08415).
//           PASS 1 stores the gate's part alone, PASS 2 finishes with up (gate and up of different types).
//           KEEP: what is read of a slot that has a partner is also stored there; the last pass logs 1 + the expert's id for
//           each such slot, 0 for the others.
// Inputs    x f32 (gained), norm_partials, routing (ids, weights, addresses, partners [n_slots]); expert spans by address.
//           KEEP: log words [first_filled + 2 * (n_slots * row of the batch + slot)]. Rows lie a pitch behind one another.
// Who       workgroup -> ROWS rows of one slot (y) of one row of the batch (z), if that has experts; its lanes share the
//           columns (include/dot.glsl).
// Assumes   rows are 16-byte aligned; workgroup size is a multiple of 8, at least ROWS.
// Dispatch  (ceil(n_rows / ROWS), n_slots, rows of the batch)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "weight_row.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROWS = 1u;
layout(constant_id = 2) const uint PASS = 0u;  // 0 both, 1 gate only, 2 up only
layout(constant_id = 3) const uint ACTIVATION = 0u;
layout(constant_id = 4) const uint BIASED = 0u;  // spans have biases
layout(constant_id = 5) const uint LOADED_WORDS = 16u;

layout(set = 0, binding = 0, std430) readonly buffer Input { Words4Bound x4[]; };
layout(set = 0, binding = 1, std430) readonly buffer PartialsIn { float norm_partials[]; };
layout(set = 0, binding = 2, std430) readonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 3, std430) buffer Act { float act[]; };
#ifdef KEEP
layout(set = 0, binding = 4, std430) writeonly buffer Log { uint filled_log[]; };
#endif

layout(push_constant, std430) uniform Push {
    uvec2 span;             // a fixed expert (dense feed-forward); null: the routed ones
    uint gate_offset;       // bytes from the start of a span
    uint up_offset;
    uint gate_bias;         // the same of f32 [n_rows], if BIASED
    uint up_bias;
    uint n_rows;
    uint row_bytes;
    uint n_blocks;
    uint n_slots;
    uint n_partials;
    float inverse_width;
    float eps;
    uint x_pitch;           // from row to row of the batch, in vec4
    uint partials_pitch;    // the same in words
    uint routing_pitch;
    uint act_pitch;
#ifdef KEEP
    uint first_filled;
#endif
#ifdef CODE_BOOK_WORDS
    uvec2 code_book;        // see include/types/code_book.glsl
#endif
};

#include "reduce.glsl"
#include "rms.glsl"

uint first_routing;
#include "routing.glsl"

uint first_row;
uint first_x; // in vec4
WeightRow expert_span;

const uint N_DOTS = PASS == 0u ? 2u * ROWS : ROWS;
const uint N_SUMS = N_DOTS + 1u; // the last is that of the norm
#include "sums.glsl"
#define COLUMNS 1u // other rows of the batch use other experts

WeightRow slot_matrix(uint slot) { return expert_span; }

// Dots [0, ROWS) are gate rows, then up rows; a single pass has only its own.
WeightRow dot_row(WeightRow span, uint r) {
    const bool is_up = PASS == 2u || r >= ROWS;
    return matrix_row(row_add(span, is_up ? up_offset : gate_offset), first_row + r % ROWS, n_rows, row_bytes);
}

vec4 activation4(uint slot, uint column, uint index4) { return bound_vec4(x4[first_x + index4]); }
float slot_weight(uint slot) { return 1.0; }

#include "dot.glsl"

#include "activation.glsl"

// Dot r times the scale, plus the bias of its row.
float projected(uint r, uint row, uint bias_offset, float scale) {
    precise float value = scale * sum_total(r);
    if (BIASED != 0u) value += span_bias(expert_span, bias_offset, row);
    return value;
}

void store_row(uint row, uint r, float scale) {
    const uint index = gl_WorkGroupID.z * act_pitch + gl_WorkGroupID.y * n_rows + row;
    float value = projected(r, row, PASS == 2u ? up_bias : gate_bias, scale);
    if (PASS == 0u) value = activated(value, projected(r + ROWS, row, up_bias, scale));
    if (PASS == 2u) value = activated(act[index], value);
    act[index] = value;
}

#ifdef KEEP
void log_filled(uint slot) {
    const uint word = first_filled + 2u * (n_slots * gl_WorkGroupID.z + slot);
    if (PASS != 1u) filled_log[word] = is_null(expert_span.landing) ? 0u : 1u + routed_id(slot);
}
#endif

void main() {
    const uint lane = gl_LocalInvocationIndex;
    const uint slot = gl_WorkGroupID.y, first_partial = gl_WorkGroupID.z * partials_pitch;
    first_x = gl_WorkGroupID.z * x_pitch;
    first_routing = gl_WorkGroupID.z * routing_pitch;
    const NormPartials partials = load_norm_partials(first_partial, n_partials);
    const uvec2 place = is_null(span) ? routed_address(slot, n_slots) : span;
    if (is_null(place)) return; // the row is inert
    expert_span = weight_row(place, landing_of(slot, n_slots));
    first_row = gl_WorkGroupID.x * ROWS;
    float dots[N_PRODUCTS], sums[N_SUMS];
    prepare_dots();
    dot_rows(1u, n_blocks, dots);
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) sums[r] = dots[r];
    sums[N_DOTS] = norm_part(partials, first_partial, n_partials);
    reduce_sums(sums);
    const float scale = rms_scale(sum_total(N_DOTS), n_partials, inverse_width, eps);
    if (lane < ROWS && first_row + lane < n_rows) store_row(first_row + lane, lane, scale);
#ifdef KEEP
    if (gl_WorkGroupID.x == 0u && lane == 0u) log_filled(slot);
#endif
}
