// IQ2_S in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of indices (n x 2 uvec4), signs (n x 2),
// the upper two bits of the indices (n x 8 bytes), scales (n x 8 bytes) and d (n x f16). Chunk t has a word of the first two
// and a byte of the next two; the scale of the first 16 weights is in the low nibble. weight = d*(scale + 0.5)/4*q.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 2
#define PART_WORDS4 2
#define SINGLE_WORDS 5
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

// Bytes of indices, a word for each chunk.
uint common_offset(uint n_blocks, uint block) { return n_blocks * 0u + block * 32u; }
uint common_of(uint t) { return t >> 2u; }
bool is_first_of_common(uint t) { return (t & 3u) == 0u; }

// Signs.
uint part_offset(uint n_blocks, uint block) { return n_blocks * 32u + block * 32u; }
uint part_of(uint t) { return t >> 2u; }
bool is_first_of_part(uint t) { return (t & 3u) == 0u; }

// Eight bytes of upper bits, eight of scales, and d.
uint single_offset(uint n_blocks, uint block, uint i) {
    if (i == 4u) return n_blocks * 80u + pair_offset(block);
    return n_blocks * (64u + (i >> 1u) * 8u) + block * 8u + (i & 1u) * 4u;
}
bool is_first_of_single(uint block, uint i) { return i < 4u || is_first_of_pair(block); }

#include "types/iq2_values.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uint indices = word_at(chunk.common_word, t & 3u), signs = word_at(chunk.part, t & 3u);
    const uint shift = (t & 3u) * 8u;
    const uint upper = (t < 4u ? chunk.single[0] : chunk.single[1]) >> shift;
    const uint levels = (t < 4u ? chunk.single[2] : chunk.single[3]) >> shift;
    const float d = half_of_pair(chunk.single[4], block);
    scale = vec4(d * (0.5 + float(int(levels & 0xFu))) * 0.25, 0.0, d * (0.5 + float(int((levels >> 4u) & 0xFu))) * 0.25, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uint index = ((indices >> (8u * i)) & 0xFFu) | (((upper >> (2u * i)) & 3u) << 8u);
        iq2_weights(index, SIGN_BITS(signs >> (8u * i)), q[2u * i], q[2u * i + 1u]);
    }
}
