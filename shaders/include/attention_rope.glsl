// RoPE of one dim (Su et al. 2021) and the scale of an RMSNorm, of a token's rows on their way into attention.
// Needs: address.glsl, ROTARY_DIM, ROPE_STYLE, the push constants `rope_table` and `eps`.
const uint ROTARY_PAIRS = ROTARY_DIM / 2u;

bool is_second(uint d) { return ROPE_STYLE == 0u ? d >= ROTARY_PAIRS : (d & 1u) != 0u; }

// The dim that is turned together with dim `d`.
uint rotation_partner(uint d) {
    const uint distance = ROPE_STYLE == 0u ? ROTARY_PAIRS : 1u;
    return is_second(d) ? d - distance : d + distance;
}

// Cosine and sine of the angle by which dim `d` is turned.
vec2 rotation(uint d, uint position) {
    const uint pair = ROPE_STYLE == 0u ? d % ROTARY_PAIRS : d / 2u;
    return uintBitsToFloat(AddressEntry(address_add_product(rope_table, position * ROTARY_PAIRS + pair, 8u)).address);
}

// Dim `d` of a row, turned.
float turned(float value, float partner, uint d, vec2 cosine_sine) {
    return value * cosine_sine.x + (is_second(d) ? partner : -partner) * cosine_sine.y;
}

float inverse_rms(float squares, uint width) { return 1.0 / sqrt(squares / float(width) + eps); }
