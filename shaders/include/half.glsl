// float -> IEEE half, the same bits on every device: packHalf2x16 leaves the rounding to the driver, so it is only given numbers
// that a half can hold. Rounds to nearest even; magnitudes above 65504 saturate (a cached key must stay finite); NaN stays NaN.
// Needs: nothing in scope.
const float HALF_MAX = 65504.0;

// The nearest number that a half holds. A sum with 1.5*2^13 times the power of two at or below a number keeps 11 bits of it, and
// none below 2^-24 if the power is that of the least normal half.
float round_to_half(float value) {
    const float finite = clamp(value, -HALF_MAX, HALF_MAX);
    const uint power = max(floatBitsToUint(finite) & 0x7F800000u, 0x38800000u);
    const float shift = uintBitsToFloat(power + 0x06C00000u);
    precise const float shifted = finite + shift;
    precise const float rounded = shifted - shift;
    const bool is_nan = (floatBitsToUint(value) & 0x7FFFFFFFu) > 0x7F800000u;
    return is_nan ? value : rounded;
}

uint pack_half2(float low, float high) { return packHalf2x16(vec2(round_to_half(low), round_to_half(high))); }
