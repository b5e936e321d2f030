// Computes  sums[lane] = xor of all words that lane reads: nothing but loads, to see how fast they come.
// Inputs    source, uvec4 [n_groups * UNITS * workgroup size], by address.
// Who       a workgroup takes consecutive units; in each of its UNITS steps neighbouring lanes take neighbouring units.
// Assumes   the address is a multiple of 16, the number of units fits 32 bits.
// Dispatch  (n_groups, 1, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) writeonly buffer Sums { uint sums[]; };

layout(push_constant, std430) uniform Push { uvec2 source; };

const uint UNITS = 16u;  // vkmoe/gpu/link_speed.py: UNITS_PER_LANE

void main() {
    const uint first = gl_WorkGroupID.x * gl_WorkGroupSize.x * UNITS + gl_LocalInvocationID.x;
    uvec4 units[UNITS];  // all in flight before the first is used: a bus is slow to answer
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) {
        units[i] = load_words4(address_add_product(source, first + i * gl_WorkGroupSize.x, 16u));
    }
    uvec4 sum = uvec4(0u);
    [[unroll]] for (uint i = 0u; i < UNITS; ++i) sum ^= units[i];
    sums[gl_GlobalInvocationID.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
}
