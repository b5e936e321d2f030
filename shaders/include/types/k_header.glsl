// The header that Q4_K and Q5_K share: d and dmin (f16), then eight 6-bit scales and eight 6-bit mins in twelve bytes.

// The scales and mins of sub-blocks 2*(t/2) and 2*(t/2) + 1: (scale a, min a, scale b, min b).
precise vec4 k_quant_scales(uvec4 header, uint t) {
    const vec2 d = unpackHalf2x16(header.x);
    const bool upper = t >= 4u;
    const uint scales = upper ? (header.w & 0x0F0F0F0Fu) | ((header.y >> 2u) & 0x30303030u) : header.y & 0x3F3F3F3Fu;
    const uint mins = upper ? ((header.w >> 4u) & 0x0F0F0F0Fu) | ((header.z >> 2u) & 0x30303030u) : header.z & 0x3F3F3F3Fu;
    const uint shift = ((t >> 1u) & 1u) * 16u;
    return vec4(d.x * float(int((scales >> shift) & 0xFFu)), d.y * float(int((mins >> shift) & 0xFFu)),
                d.x * float(int((scales >> (shift + 8u)) & 0xFFu)), d.y * float(int((mins >> (shift + 8u)) & 0xFFu)));
}
