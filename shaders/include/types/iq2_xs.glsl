// IQ2_XS in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of 32 half words (n x 4 uvec4), scales
// (n x 8 bytes) and d (n x f16). A half word is an index of the code book, and seven signs above it. Chunk t has four; byte t of
// the scales has that of the first 16 weights in its low nibble. weight = d*(scale + 0.5)/4*q.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 0
#define PART_WORDS4 4
#define SINGLE_WORDS 3
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }

// Eight bytes of scales, and d.
uint single_offset(uint n_blocks, uint block, uint i) {
    return i < 2u ? n_blocks * 64u + block * 8u + i * 4u : n_blocks * 72u + pair_offset(block);
}
bool is_first_of_single(uint block, uint i) { return i < 2u || is_first_of_pair(block); }

#include "types/iq2_values.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 words = chunk.part;
    const uvec2 own = (t & 1u) == 0u ? words.xy : words.zw;
    const uint levels = (t < 4u ? chunk.single[0] : chunk.single[1]) >> ((t & 3u) * 8u);
    const float d = half_of_pair(chunk.single[2], block);
    scale = vec4(d * (0.5 + float(int(levels & 0xFu))) * 0.25, 0.0, d * (0.5 + float(int((levels >> 4u) & 0xFu))) * 0.25, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uint half_word = (i < 2u ? own.x : own.y) >> ((i & 1u) * 16u);
        iq2_weights(half_word & 0x1FFu, EIGHT_SIGNS(half_word >> 9u), q[2u * i], q[2u * i + 1u]);
    }
}
