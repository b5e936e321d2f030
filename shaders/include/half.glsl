// float -> IEEE half by integer arithmetic: packHalf2x16 leaves the rounding to the driver, this does not.
// Rounds to nearest even; magnitudes above 65504 saturate (a cached key must stay finite); NaN stays NaN.
// Needs: nothing in scope.
uint half_bits(float value) {
    const uint bits = floatBitsToUint(value);
    const uint sign = (bits >> 16u) & 0x8000u;
    uint magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u;
    magnitude = min(magnitude, 0x477FE000u);
    if (magnitude >= 0x38800000u) {
        const uint rounded = magnitude + 0xFFFu + ((magnitude >> 13u) & 1u);
        return sign | ((rounded - 0x38000000u) >> 13u);
    }
    // Subnormal: the mantissa with its hidden bit, shifted down to units of 2^-24.
    const uint shift = 126u - (magnitude >> 23u);
    if (shift > 24u) return sign;
    const uint mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
    const uint units = mantissa >> shift;
    const uint rest = mantissa & ((1u << shift) - 1u);
    const uint middle = 1u << (shift - 1u);
    return sign | (units + ((rest > middle || (rest == middle && (units & 1u) != 0u)) ? 1u : 0u));
}

uint pack_half2(float low, float high) { return half_bits(low) | (half_bits(high) << 16u); }
