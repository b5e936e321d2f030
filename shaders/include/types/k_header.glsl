// The header that Q4_K and Q5_K share: d and dmin (f16), then eight 6-bit scales and eight 6-bit mins in twelve bytes.

// The scales and mins of sub-blocks 2*(t/2) and 2*(t/2) + 1: (scale a, min a, scale b, min b).
precise vec4 k_quant_scales(uvec4 header, uint t) {
    const vec2 d = unpackHalf2x16(header.x);
    // Masks and shifts are the same for all rows. The upper four have their low nibbles in w, two more bits in y and z.
    const bool upper = t >= 4u;
    const uint shift = (t & 2u) * 8u, min_shift = shift + (upper ? 4u : 0u);
    const uint low = upper ? 0x0F0Fu : 0x3F3Fu, high = upper ? 0x3030u : 0u;
    const uint first = upper ? header.w : header.y, second = upper ? header.w : header.z;
    const uint scales = ((first >> shift) & low) | ((header.y >> (shift + 2u)) & high);
    const uint mins = ((second >> min_shift) & low) | ((header.z >> (shift + 2u)) & high);
    return vec4(d.x * float(int(scales & 0xFFu)), d.y * float(int(mins & 0xFFu)),
                d.x * float(int(scales >> 8u)), d.y * float(int(mins >> 8u)));
}
