// The numbers of MXFP4 and NVFP4: E2M1 has a sign, two bits of exponent, one of mantissa; q is twice its value.

// Four codes, in the low or the high nibbles of a word's bytes, as q/Q_UNIT.
#ifdef BLOCK_PER_LANE
// CPUs convert integers faster than f16. 12 + q of codes in bytes: q is 0, 1, 2, 3, 4, 6, 8, 12 for the lower three bits.
uint e2m1_plus_12(uint codes) {
    const uint magnitude = codes & 0x07070707u;
    const uint over_4 = magnitude & (((magnitude >> 2u) & 0x01010101u) * 3u);  // 0, 1, 2, 3 for the codes from 4 up
    const uint doubled = magnitude + over_4 + ((over_4 & (over_4 >> 1u) & 0x01010101u) << 1u);
    const uint flip = ((codes >> 3u) & 0x01010101u) * 31u;  // negative: 31 - q, then less 31
    return (doubled ^ flip) + 0x0C0C0C0Cu - flip;
}

precise vec4 e2m1_low(uint word) { return -12.0 + bytes_to_vec4(e2m1_plus_12(word & 0x0F0F0F0Fu)); }
precise vec4 e2m1_high(uint word) { return -12.0 + bytes_to_vec4(e2m1_plus_12((word >> 4u) & 0x0F0F0F0Fu)); }
#else
// The bits of E2M1 with the sign at bit 15 and the rest at bits 9..11 are an f16 of 2^-14 its value. 0.5 is subnormal in both:
// conversion must keep that. AMD, NVIDIA and Intel do; the self-test finds a device that does not.
#define Q_UNIT 32768.0

vec4 halves_to_vec4(uint even, uint odd) {
    const vec2 x_z = unpackHalf2x16(even & 0x8E008E00u);
    const vec2 y_w = unpackHalf2x16(odd & 0x8E008E00u);
    return vec4(x_z.x, y_w.x, x_z.y, y_w.y);
}

// First the signs move to their distance from the other bits. One instruction merges words by complementary masks.
vec4 e2m1_low(uint word) {
    const uint spread = (word & 0xBFBFBFBFu) | ((word << 3u) & 0x40404040u);
    return halves_to_vec4(spread << 9u, spread << 1u);
}

vec4 e2m1_high(uint word) {
    const uint spread = (word & 0x80808080u) | ((word >> 3u) & 0x7F7F7F7Fu);
    return halves_to_vec4(spread << 8u, spread);
}
#endif
