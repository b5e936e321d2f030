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
