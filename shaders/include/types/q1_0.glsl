// Q1_0 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 128 the planes of bits (n x 1 uvec4) and d (n x f16).
// Chunk t has word t. weight = d where its bit is set, else -d.
#define BLOCK_CHUNKS 4u
#define OWN_WORDS4 0
#define COMMON_WORDS4 1
#define PART_WORDS4 0
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 32u + t * 8u; }

uint common_offset(uint n_blocks, uint block) { return block * 16u; }
uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 16u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

#include "types/spread_bits.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uint bits = word_at(chunk.common_word, t);
    const float d = half_of_pair(chunk.single[0], block);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i) q[i] = -1.0 + bytes_to_vec4(spread_bits(bits >> (4u * i)) << 1u);
}
