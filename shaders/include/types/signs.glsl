// Numbers of 0 or more, negative where bit i of `bits` is set for number i.
vec4 with_signs(vec4 numbers, uint bits) {
    const uvec4 signs = uvec4(bits << 31u, bits << 30u, bits << 29u, bits << 28u) & 0x80000000u;
    return uintBitsToFloat(floatBitsToUint(numbers) | signs);
}

// The signs of eight weights. Files have seven: an even number of the eight is set.
uint eight_signs(uint seven) {
    const uint signs = seven & 0x7Fu;
    return signs | ((uint(bitCount(signs)) & 1u) << 7u);
}

#ifdef MATRIX_TILES
// Fewer instructions for tiles on matrix units: values of q are given as q + Q_BIAS, and none of q is 0.
#define Q_BIAS 128.0

// The signs of eight weights, as seven bits are in files: bit 0 of each byte of two words.
uvec2 spread_seven(uint seven) {
    const uint signs = seven & 0x7Fu, copies = signs * 0x00204081u;  // copy i begins at bit 7 * i
    return uvec2(copies, (copies >> 4u) | (uint(bitCount(signs)) << 24u)) & 0x01010101u;
}

// Of eight bits.
uvec2 spread_eight(uint eight) { return (uvec2(eight, eight >> 4u) & 0xFu) * 0x00204081u & 0x01010101u; }

// Four bytes below 128, negative where their byte of `signs` is 1, and Q_BIAS.
vec4 biased_with_signs(uint word, uint signs) {
    const uint biased = (word ^ (0x80808080u - signs)) + signs;
    return vec4(biased & 0xFFu, (biased >> 8u) & 0xFFu, (biased >> 16u) & 0xFFu, biased >> 24u);
}
#endif
