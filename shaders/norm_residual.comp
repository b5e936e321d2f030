// Computes  for each row of a batch, behind a block: y = the sum of its parts, each normed by rms(v) = v / sqrt(mean(v^2) + eps)
//           times its gain where it has one; then hidden = scale * (hidden + rms(y) * gain) and, if there is a next gain, gained =
//           hidden * next gain and the sum of hidden^2 (for the next fused RMSNorm). RMSNorm: Zhang & Sennrich 2019, eq. 4; norms
//           behind blocks: Gemma 2 (arXiv:2408.00118), section 2.
// Inputs    parts a and b (read if N_PARTS is 2), hidden f32 [4 * row_vec4s]; gain f32 [4 * row_vec4s] by address; the parts' gains
//           and the next one alike, or null; scale f32 [1] by address, or null: 1. Rows lie a pitch behind one another.
// Who       workgroup -> one row (lines of them, y, in each z); a lane takes each size-th vec4, PIECE of them at once, so that their loads do not wait for
//           each other. Parts are read again in each of three walks: registers have no room for long rows.
// Assumes   no part is hidden or gained.
// Dispatch  (1, lines, rows / lines)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint N_PARTS = 1u;

layout(set = 0, binding = 0, std430) readonly buffer FirstPart { vec4 a4[]; };
layout(set = 0, binding = 1, std430) readonly buffer SecondPart { vec4 b4[]; };
layout(set = 0, binding = 2, std430) buffer Hidden { vec4 hidden4[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Gained { vec4 gained4[]; };
layout(set = 0, binding = 4, std430) writeonly buffer PartialsOut { float partials_out[]; };

layout(push_constant, std430) uniform Push {
    uvec2 a_gain;
    uvec2 b_gain;
    uvec2 norm_gain;        // of the sum of the parts
    uvec2 scale;
    uvec2 gain;             // of the next norm; null: nothing is left for one
    uint row_vec4s;
    uint a_pitch;           // from row to row, in vec4
    uint b_pitch;
    uint hidden_pitch;      // the same of hidden and gained, in words
    uint partials_pitch;
    float eps;
};

#include "reduce.glsl"

#define ROW (gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y)
const uint PIECE = 8u;
const uint SIZE = gl_WorkGroupSize.x;

// Which factor each part has before its gain.
struct Factors {
    float a;
    float b;
};

vec4 part_a(uint i) { return a4[ROW * a_pitch + i]; }
vec4 part_b(uint i) { return b4[ROW * b_pitch + i]; }
vec4 gain4(uvec2 gains, uint i) { return load_vec4(address_add(gains, i * 16u)); }

float inverse_rms(float squares) { return 1.0 / sqrt(squares / float(4u * row_vec4s) + eps); }

// The vec4s [first, first + PIECE * SIZE) of a row that are this lane's: `work` says what is done with number i. Those beyond the
// row are the last one again, which counts for nothing there.
#define WALK(work) \
    for (uint first = gl_LocalInvocationIndex; first < row_vec4s; first += PIECE * SIZE) { \
        [[unroll]] for (uint p = 0u; p < PIECE; ++p) { \
            const uint at = first + p * SIZE, i = min(at, row_vec4s - 1u); \
            const bool counts = at < row_vec4s; \
            work \
        } \
    }

vec4 joined(uint i, Factors factors) {
    precise vec4 y = part_a(i);
    if (!is_null(a_gain)) y = y * factors.a * gain4(a_gain, i);
    if (N_PARTS == 2u) {
        precise vec4 other = part_b(i);
        if (!is_null(b_gain)) other = other * factors.b * gain4(b_gain, i);
        y += other;
    }
    return y;
}

Factors part_factors() {
    Factors factors = Factors(1.0, 1.0);
    const bool norms_a = !is_null(a_gain), norms_b = N_PARTS == 2u && !is_null(b_gain);
    if (!norms_a && !norms_b) return factors;
    precise float a_squares = 0.0, b_squares = 0.0;
    WALK(
        const vec4 a = part_a(i);
        a_squares += counts ? dot(a, a) : 0.0;
        if (N_PARTS == 2u) {
            const vec4 b = part_b(i);
            b_squares += counts ? dot(b, b) : 0.0;
        }
    )
    factors.a = inverse_rms(workgroup_sum(a_squares));
    if (N_PARTS == 2u) factors.b = inverse_rms(workgroup_sum(b_squares));
    return factors;
}

void main() {
    const Factors factors = part_factors();
    precise float squares = 0.0;
    WALK(
        const vec4 y = joined(i, factors);
        squares += counts ? dot(y, y) : 0.0;
    )
    const float factor = inverse_rms(workgroup_sum(squares));
    const float scaling = is_null(scale) ? 1.0 : load_float(scale);
    const uint first_hidden = ROW * (hidden_pitch / 4u);
    precise float left = 0.0;
    WALK(
        const vec4 old = hidden4[first_hidden + i];
        precise const vec4 updated = scaling * fma(joined(i, factors) * factor, gain4(norm_gain, i), old);
        const vec4 next_gain = is_null(gain) ? vec4(0.0) : gain4(gain, i);
        precise const vec4 product = updated * next_gain;
        if (counts) {
            hidden4[first_hidden + i] = updated;
            if (!is_null(gain)) gained4[first_hidden + i] = product;
        }
        left += counts ? dot(updated, updated) : 0.0;
    )
    if (is_null(gain)) return;
    left = workgroup_sum(left);
    if (gl_LocalInvocationIndex == 0u) partials_out[ROW * partials_pitch] = left;
}
