// What the three IQ2 types share: a code book entry has eight pairs of bits, which stand for the sizes 8, 25 and 43.
#include "types/code_book.glsl"
#include "types/signs.glsl"
#include "types/two_bits.glsl"

vec4 iq2_sizes(uint entry) {
    const uint n = spread_pairs(entry);
    return bytes_to_vec4(n * 17u + ((n >> 1u) & 0x01010101u) + 0x08080808u);
}

// Eight weights.
void iq2_weights(uint index, uint signs, out vec4 first, out vec4 last) {
    const uint entry = code_book_half(index);
    first = with_signs(iq2_sizes(entry), signs);
    last = with_signs(iq2_sizes(entry >> 8u), signs >> 4u);
}
