// BF16: raw, 32 weights a chunk in four uvec4; a bfloat16 is the upper half of a float.
#define OWN_WORDS4 4
#define SINGLE_WORDS 0
#include "types/one_chunk.glsl"

vec4 two_words(uint first, uint second) {
    return uintBitsToFloat(uvec4(first << 16u, first & 0xFFFF0000u, second << 16u, second & 0xFFFF0000u));
}

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    scale = vec4(1.0, 0.0, 1.0, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uvec4 words = chunk.own[i];
        q[2u * i] = two_words(words.x, words.y);
        q[2u * i + 1u] = two_words(words.z, words.w);
    }
}
