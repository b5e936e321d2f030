// IQ2_XXS in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of pairs of words (n x 4 uvec4) and
// d (n x f16). Chunk t: four bytes are indices of the code book; the next word has four times seven signs, and the scale above
// them. weight = d*(scale + 0.5)/4*q.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 0
#define PART_WORDS4 4
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 64u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

#include "types/iq2_values.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 words = chunk.part;
    const uvec2 own = (t & 1u) == 0u ? words.xy : words.zw;
    const float d = half_of_pair(chunk.single[0], block) * (0.5 + float(int(own.y >> 28u))) * 0.25;
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i)
        iq2_weights((own.x >> (8u * i)) & 0xFFu, EIGHT_SIGNS(own.y >> (7u * i)), q[2u * i], q[2u * i + 1u]);
}
