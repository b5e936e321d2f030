// Computes  sums[lane] = xor of the words that lane reads: nothing but loads, to compare ways to load.
// Inputs    source, uvec4 [n_groups * UNITS * workgroup_size], by address (BY_ADDRESS) or as binding 0.
// Who       a workgroup takes consecutive units; in each of its UNITS steps neighbouring lanes take neighbouring units.
// Assumes   the address is a multiple of 16; the number of units fits 32 bits.
// Dispatch  (n_groups, 1, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "../../shaders/include/address.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Source { uvec4 units[]; } source;
layout(set = 0, binding = 1, std430) writeonly buffer Sums { uint sums[]; };
layout(push_constant) uniform Push { uvec2 address; } push;

const uint UNITS = 16u;  // bench/address.py: UNITS_PER_LANE

uvec4 load_unit(uint index) {
#ifdef BY_ADDRESS
    return load_words4(address_add_product(push.address, index, 16u));
#else
    return source.units[index];
#endif
}

void main() {
    const uint base = gl_WorkGroupID.x * gl_WorkGroupSize.x * UNITS + gl_LocalInvocationID.x;
    uvec4 sum = uvec4(0u);
    for (uint step = 0u; step < UNITS; ++step) {
        sum ^= load_unit(base + step * gl_WorkGroupSize.x);
    }
    sums[gl_GlobalInvocationID.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
}
