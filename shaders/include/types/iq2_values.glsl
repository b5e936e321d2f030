// What the three IQ2 types share: a code book entry is a word with eight nibbles, 0 to 2, which stand for the sizes 8, 25 and 43.
#include "types/code_book.glsl"
#include "types/signs.glsl"

#ifdef MATRIX_TILES
#define EIGHT_SIGNS spread_seven
#define SIGN_BITS spread_eight

// Of the low nibbles.
uint iq2_sizes(uint entry) {
    const uint n = entry & 0x0F0F0F0Fu;
    return n * 17u + ((n >> 1u) & 0x01010101u) + 0x08080808u;
}

// Eight weights.
void iq2_weights(uint index, uvec2 signs, out vec4 first, out vec4 last) {
    const uint entry = code_book_word(index);
    first = biased_with_signs(iq2_sizes(entry), signs.x);
    last = biased_with_signs(iq2_sizes(entry >> 4u), signs.y);
}
#else
#define EIGHT_SIGNS eight_signs
#define SIGN_BITS

// Of the low nibbles.
vec4 iq2_sizes(uint entry) {
    const uint n = entry & 0x0F0F0F0Fu;
    return bytes_to_vec4(n * 17u + ((n >> 1u) & 0x01010101u) + 0x08080808u);
}

// Eight weights.
void iq2_weights(uint index, uint signs, out vec4 first, out vec4 last) {
    const uint entry = code_book_word(index);
    first = with_signs(iq2_sizes(entry), signs);
    last = with_signs(iq2_sizes(entry >> 4u), signs >> 4u);
}
#endif
