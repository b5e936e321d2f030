// Q5_0 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 32 the planes of nibbles (n x 1 uvec4; low ones are
// weights 0..15, high ones 16..31), fifth bits (n x 4 bytes) and d (n x f16). weight = d*(q - 16). One chunk is one block.
#define OWN_WORDS4 1
#define SINGLE_WORDS 2
#include "types/one_chunk.glsl"

uint single_offset(uint n_blocks, uint block, uint i) {
    return i == 0u ? n_blocks * 16u + block * 4u : n_blocks * 20u + pair_offset(block);
}
bool is_first_of_single(uint block, uint i) { return i == 0u || is_first_of_pair(block); }

#include "types/spread_bits.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const uint high = chunk.single[0];
    const float d = half_of_pair(chunk.single[1], block);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = -16.0 + bytes_to_vec4((nibbles[i] & 0x0F0F0F0Fu) | (spread_bits(high >> (4u * i)) << 4u));
        q[i + 4u] = -16.0 + bytes_to_vec4(((nibbles[i] >> 4u) & 0x0F0F0F0Fu) | (spread_bits(high >> (4u * i + 16u)) << 4u));
    }
}
