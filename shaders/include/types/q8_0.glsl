// Q8_0 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 32 the planes qs (n x 2 uvec4, int8) and
// d (n x f16). weight = d*q. One chunk is one block.
#define OWN_WORDS4 2
#define SINGLE_WORDS 1
#include "types/one_chunk.glsl"

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 32u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

vec4 signed_bytes(uint word) {
    const int value = int(word);
    return vec4(float(bitfieldExtract(value, 0, 8)), float(bitfieldExtract(value, 8, 8)),
                float(bitfieldExtract(value, 16, 8)), float(bitfieldExtract(value, 24, 8)));
}

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 first = chunk.own[0];
    const uvec4 second = chunk.own[1];
    const float d = half_of_pair(chunk.single[0], block);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = signed_bytes(first[i]);
        q[i + 4u] = signed_bytes(second[i]);
    }
}
