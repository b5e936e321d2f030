// F32: raw, 32 weights a chunk in eight uvec4.
#include "types/one_chunk.glsl"

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    scale = vec4(1.0, 0.0, 1.0, 0.0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i) q[i] = uintBitsToFloat(row_words4(row, block * 128u + i * 16u));
}
