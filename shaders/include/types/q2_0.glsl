// Q2_0 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 64 the planes of bit pairs (n x 1 uvec4) and d (n x
// f16). Chunk t has two words, a byte of which has four weights. weight = d*(q - 1).
#define BLOCK_CHUNKS 2u
#define OWN_WORDS4 0
#define COMMON_WORDS4 1
#define PART_WORDS4 0
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 16u + t * 8u; }

uint common_offset(uint n_blocks, uint block) { return block * 16u; }
uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 16u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

#include "types/two_bits.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 words = chunk.common_word;
    const uvec2 pairs = t == 0u ? words.xy : words.zw;
    const float d = half_of_pair(chunk.single[0], block);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i)
        q[i] = -1.0 + bytes_to_vec4(spread_pairs((i < 4u ? pairs.x : pairs.y) >> ((i & 3u) * 8u)));
}
