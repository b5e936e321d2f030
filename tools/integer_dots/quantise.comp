// Computes  blocks of 32 numbers of 8 bits, their scale and its products with the sums of 16 numbers, for dot.glsl beside this.
// Inputs    x f32 [32 * n_blocks].
// Who       lane -> four numbers.
// Assumes   subgroups of at least 8 lanes, full; workgroup size a multiple of 8.
// Dispatch  ceil(8 * n_blocks / workgroup size).
#version 460
#extension GL_KHR_shader_subgroup_shuffle : require
layout(local_size_x_id = 0) in;
layout(set = 0, binding = 0, std430) readonly buffer Input { vec4 x4[]; };
layout(set = 0, binding = 1, std430) writeonly buffer Output { uint words[]; };
layout(push_constant, std430) uniform Push { uint n_blocks; };

void main() {
    const uint i = gl_GlobalInvocationID.x, block = i / 8u;
    const vec4 x = x4[min(i, 8u * n_blocks - 1u)], size = abs(x);
    float largest = max(max(size.x, size.y), max(size.z, size.w));
    for (uint step = 1u; step < 8u; step *= 2u) largest = max(largest, subgroupShuffleXor(largest, step));
    const float scale = largest / 127.0;
    const vec4 q = round(x * (largest > 0.0 ? 127.0 / largest : 0.0));
    float sum = scale * ((q.x + q.y) + (q.z + q.w));
    for (uint step = 1u; step < 4u; step *= 2u) sum += subgroupShuffleXor(sum, step);
    if (block >= n_blocks) return;
    const uvec4 bytes = uvec4(ivec4(q)) & 0xFFu;
    words[block * 12u + i % 8u] = bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
    if (i % 8u == 0u) words[block * 12u + 8u] = floatBitsToUint(scale);
    if (i % 4u == 0u) words[block * 12u + 9u + (i / 4u) % 2u] = floatBitsToUint(sum);
}
