// IQ3_XXS in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of indices (n x 4 uvec4), words of
// signs and scales (n x 2 uvec4) and d (n x f16). Chunk t has eight bytes of indices of the code book, whose entries are the
// sizes of four weights, and a word: four times seven signs, and the scale above them. weight = d*(scale + 0.5)/2*q.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 2
#define PART_WORDS4 4
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

// Indices.
uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }

// Bytes of signs and scales, a word for each chunk.
uint common_offset(uint n_blocks, uint block) { return n_blocks * 64u + block * 32u; }
uint common_of(uint t) { return t >> 2u; }
bool is_first_of_common(uint t) { return (t & 3u) == 0u; }

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 96u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

#include "types/code_book.glsl"
#include "types/signs.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 words = chunk.part;
    const uvec2 indices = (t & 1u) == 0u ? words.xy : words.zw;
    const uint own = word_at(chunk.common_word, t & 3u);
    const float d = half_of_pair(chunk.single[0], block) * (0.5 + float(int(own >> 28u))) * 0.5;
    scale = vec4(d, 0.0, d, 0.0);
#ifdef MATRIX_TILES
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uint pair = (i < 2u ? indices.x : indices.y) >> ((i & 1u) * 16u);
        const uvec2 signs = spread_seven(own >> (7u * i));
        q[2u * i] = biased_with_signs(code_book_word(pair & 0xFFu), signs.x);
        q[2u * i + 1u] = biased_with_signs(code_book_word((pair >> 8u) & 0xFFu), signs.y);
    }
#else
    [[unroll]] for (uint i = 0u; i < 8u; ++i) {
        const uint index = ((i < 4u ? indices.x : indices.y) >> ((i & 3u) * 8u)) & 0xFFu;
        const uint signs = eight_signs(own >> (7u * (i >> 1u))) >> ((i & 1u) * 4u);
        q[i] = with_signs(bytes_to_vec4(code_book_word(index)), signs);
    }
#endif
}
