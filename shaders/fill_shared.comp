// Computes  words[i] = value for all words that workgroups share, so that a kernel which reads there before it writes finds it;
//           seen[invocation] = one of them.
// Inputs    value and first, any words.
// Who       a workgroup fills memory of its own; neighbouring lanes take neighbouring units of 16 bytes.
// Assumes   nothing.
// Dispatch  (n_groups, 1, 1): so many that each place where workgroups run gets some.
#version 460

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) writeonly buffer Seen { uint seen[]; };

layout(push_constant, std430) uniform Push {
    uint value;
    uint first; // the unit that the first lane reads
};

const uint UNITS = 1024u; // 16 KiB: what every Vulkan device has, and all that kernels use

shared uvec4 units[UNITS];

void main() {
    const uint lane = gl_LocalInvocationIndex;
    for (uint i = lane; i < UNITS; i += gl_WorkGroupSize.x) units[i] = uvec4(value);
    barrier();
    // Compilers leave out what is never read; which unit this is they cannot know.
    const uvec4 read = units[(first + lane) % UNITS];
    seen[gl_GlobalInvocationID.x] = read.x & read.y & read.z & read.w;
}
