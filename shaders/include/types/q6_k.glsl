// Q6_K in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes ql (n x 8 uvec4), qh (n x 4),
// scales (n x 1, int8), d (n x f16). Chunk t: low nibbles of ql word t are weights 128*(t/4) + 32*((t%4)/2) + 16*(t%2) ..+15,
// high nibbles the same + 64. weight = d*scale*(q - 32).
#define BLOCK_CHUNKS 8u
#define STAGED_WORDS4 6u
#define HAS_STAGED
#define GROUP_B_OFFSET 16u

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 3u) * 4u; }

// Words 0..3: qh; 4: the sixteen scales; 5: d in the low half of x.
uvec4 load_staged(WeightRow row, uint n_blocks, uint block, uint i) {
    if (i < 4u) return row_words4(row, n_blocks * 128u + block * 64u + i * 16u);
    if (i == 4u) return row_words4(row, n_blocks * 192u + block * 16u);
    const uint pair = row_pair(row, n_blocks * 208u, block);
    return uvec4((block & 1u) == 0u ? pair & 0xFFFFu : pair >> 16u, 0u, 0u, 0u);
}

precise float scale_byte(uvec4 scales, uint i) {
    return float(bitfieldExtract(int(scales[i >> 2u]), int(i & 3u) * 8, 8));
}

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = row_words4(row, block * 128u + t * 16u);
    const uint half_index = t >> 2u;
    const uint quadrant = (t & 3u) >> 1u;  // 0 or 1: which 32 weights the low nibbles are; the high ones are two further
    // Indices that are constants where the words are in registers.
    const uvec4 even = half_index == 0u ? staged_word4(r, 0u) : staged_word4(r, 2u);
    const uvec4 odd = half_index == 0u ? staged_word4(r, 1u) : staged_word4(r, 3u);
    const uvec4 high = (t & 1u) == 0u ? even : odd;
    const uvec4 scales = staged_word4(r, 4u);
    const float d = unpackHalf2x16(staged_word4(r, 5u).x).x;
    const uint scale_index = half_index * 8u + quadrant * 2u + (t & 1u);
    scale = vec4(d * scale_byte(scales, scale_index), 0.0, d * scale_byte(scales, scale_index + 4u), 0.0);
    const uint shift = quadrant * 2u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = -32.0 + bytes_to_vec4((nibbles[i] & 0x0F0F0F0Fu) | (((high[i] >> shift) & 0x03030303u) << 4u));
        q[i + 4u] = -32.0 + bytes_to_vec4(((nibbles[i] >> 4u) & 0x0F0F0F0Fu) | (((high[i] >> (shift + 4u)) & 0x03030303u) << 4u));
    }
}
