// F16: raw, 32 weights a chunk in four uvec4.
#define OWN_WORDS4 4
#define SINGLE_WORDS 0
#include "types/one_chunk.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    scale = vec4(1.0, 0.0, 1.0, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uvec4 words = chunk.own[i];
        q[2u * i] = vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
        q[2u * i + 1u] = vec4(unpackHalf2x16(words.z), unpackHalf2x16(words.w));
    }
}
