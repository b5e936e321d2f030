// Floats as unsigned keys with the same order, so that comparing, selecting and breaking ties is exact integer work.
// NaN becomes -inf and -0 becomes +0. The key 0 is below every float: it marks "none".
// Needs: nothing in scope.
const uint KEY_NONE = 0u;

bool is_nan_bits(uint bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

uint order_key(float value) {
    uint bits = floatBitsToUint(value);
    if (is_nan_bits(bits)) bits = 0xFF800000u;
    if (bits == 0x80000000u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

float key_value(uint key) {
    return uintBitsToFloat((key & 0x80000000u) != 0u ? key & 0x7FFFFFFFu : ~key);
}

// The value of a key, infinities replaced by the largest finite floats: sums and differences stay free of NaN.
float finite_key_value(uint key) { return clamp(key_value(key), -3.4028234e38, 3.4028234e38); }
