// What both IQ1 types share: bytes of indices (a plane of n x 2 uvec4) and half words of their upper bits (n x 1 uvec4); a code book
// entry has eight pairs of bits, which stand for -1, 0 and 1.
#include "types/code_book.glsl"
#include "types/two_bits.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

uint common_offset(uint n_blocks, uint block) { return block * 32u; }
uint common_of(uint t) { return t >> 2u; }
bool is_first_of_common(uint t) { return (t & 3u) == 0u; }

uint part_offset(uint n_blocks, uint block) { return n_blocks * 32u + block * 16u; }
uint part_of(uint t) { return 0u; }
bool is_first_of_part(uint t) { return t == 0u; }

uint iq1_indices(WeightChunk chunk, uint t) { return word_at(chunk.common_word, t & 3u); }
uint iq1_upper(WeightChunk chunk, uint t) { return (word_at(chunk.part, t >> 1u) >> ((t & 1u) * 16u)) & 0xFFFFu; }

// Eight weights plus 1: 0, 1 or 2.
void iq1_codes(uint index, out vec4 first, out vec4 last) {
    const uint entry = code_book_half(index);
    first = bytes_to_vec4(spread_pairs(entry));
    last = bytes_to_vec4(spread_pairs(entry >> 8u));
}
