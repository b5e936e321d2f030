// IQ4_NL in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 32 the planes of nibbles (n x 1 uvec4; low
// ones are weights 0..15, high ones 16..31) and d (n x f16). weight = d*value(q). One chunk is one block.
#include "types/one_chunk.glsl"

#include "types/iq4_values.glsl"

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = row_words4(row, block * 16u);
    const float d = half_of_pair(row_pair(row, n_blocks * 16u, block), block);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = iq4_values(nibbles[i] & 0x0F0F0F0Fu);
        q[i + 4u] = iq4_values((nibbles[i] >> 4u) & 0x0F0F0F0Fu);
    }
}
