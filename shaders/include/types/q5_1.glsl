// Q5_1 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 32 the planes of nibbles (n x 1 uvec4; low ones are
// weights 0..15, high ones 16..31), fifth bits (n x 4 bytes), and d and m (n x 2 f16). weight = d*q + m. One chunk is one block.
#define OWN_WORDS4 1
#define SINGLE_WORDS 2
#define HAS_MIN
#include "types/one_chunk.glsl"

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * (16u + i * 4u) + block * 4u; }
bool is_first_of_single(uint block, uint i) { return true; }

#include "types/spread_bits.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const uint high = chunk.single[0];
    const vec2 d = unpackHalf2x16(chunk.single[1]);
    scale = vec4(d.x, -d.y, d.x, -d.y);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = bytes_to_vec4((nibbles[i] & 0x0F0F0F0Fu) | (spread_bits(high >> (4u * i)) << 4u));
        q[i + 4u] = bytes_to_vec4(((nibbles[i] >> 4u) & 0x0F0F0F0Fu) | (spread_bits(high >> (4u * i + 16u)) << 4u));
    }
}
