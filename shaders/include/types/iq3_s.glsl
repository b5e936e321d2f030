// IQ3_S in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of indices (n x 4 uvec4), signs (n x 2
// uvec4), the upper bits of the indices (n x 8 bytes), scales (n x 4 bytes) and d (n x f16). Chunk t has eight bytes of indices
// of the code book, whose entries are the sizes of four weights, a word of signs, a byte of upper bits and a nibble of scales.
// weight = d*(2*scale + 1)*q.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 2
#define PART_WORDS4 4
#define SINGLE_WORDS 4
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

// Indices.
uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }

// Bytes of signs, a word for each chunk.
uint common_offset(uint n_blocks, uint block) { return n_blocks * 64u + block * 32u; }
uint common_of(uint t) { return t >> 2u; }
bool is_first_of_common(uint t) { return (t & 3u) == 0u; }

// Eight bytes of upper bits, four of scales, and d.
uint single_offset(uint n_blocks, uint block, uint i) {
    if (i == 3u) return n_blocks * 108u + pair_offset(block);
    return i < 2u ? n_blocks * 96u + block * 8u + i * 4u : n_blocks * 104u + block * 4u;
}
bool is_first_of_single(uint block, uint i) { return i < 3u || is_first_of_pair(block); }

#include "types/code_book.glsl"
#include "types/signs.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 words = chunk.part;
    const uvec2 indices = (t & 1u) == 0u ? words.xy : words.zw;
    const uint signs = word_at(chunk.common_word, t & 3u);
    const uint upper = (t < 4u ? chunk.single[0] : chunk.single[1]) >> ((t & 3u) * 8u);
    const int level = int((chunk.single[2] >> (t * 4u)) & 0xFu);
    const float d = half_of_pair(chunk.single[3], block) * float(2 * level + 1);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i) {
        const uint low = ((i < 4u ? indices.x : indices.y) >> ((i & 3u) * 8u)) & 0xFFu;
#ifdef MATRIX_TILES
        const uint sizes = code_book_word(low | (((upper >> i) & 1u) << 8u));
        const uvec2 spread = spread_eight(signs >> (8u * (i >> 1u)));
        q[i] = biased_with_signs(sizes, (i & 1u) == 0u ? spread.x : spread.y);
#else
        q[i] = with_signs(bytes_to_vec4(code_book_word(low | (((upper >> i) & 1u) << 8u))), signs >> (4u * i));
#endif
    }
}
