// F32: raw, 32 weights a chunk in eight uvec4.
#define OWN_WORDS4 8
#define SINGLE_WORDS 0
#include "types/one_chunk.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    scale = vec4(1.0, 0.0, 1.0, 0.0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i) q[i] = uintBitsToFloat(chunk.own[i]);
}
