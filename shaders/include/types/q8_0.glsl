// Q8_0 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 32 the planes qs (n x 2 uvec4, int8) and
// d (n x f16). weight = d*q. One chunk is one block.
#include "types/one_chunk.glsl"

vec4 signed_bytes(uint word) {
    const int value = int(word);
    return vec4(float(bitfieldExtract(value, 0, 8)), float(bitfieldExtract(value, 8, 8)),
                float(bitfieldExtract(value, 16, 8)), float(bitfieldExtract(value, 24, 8)));
}

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 first = row_words4(row, block * 32u);
    const uvec4 second = row_words4(row, block * 32u + 16u);
    const float d = half_of_pair(row_pair(row, n_blocks * 32u, block), block);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = signed_bytes(first[i]);
        q[i + 4u] = signed_bytes(second[i]);
    }
}
