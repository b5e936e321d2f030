// Q2_K in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of bit pairs (n x 4 uvec4),
// scales (n x 16 bytes: scale in the low nibble, min in the high one), d and dmin (n x 2 f16). Bits 2*j and 2*j + 1 of byte
// l of word 2*h + p are weight 128*h + 32*j + 16*p + l. Chunk t: of word t/2 j = 2*(t%2), then the next j.
// weight = d*scale*q - dmin*min.
#define BLOCK_CHUNKS 8u
#define STAGED_WORDS4 6u
#define HAS_STAGED
#define GROUP_B_OFFSET 8u
#define HAS_MIN

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 1u) * 16u + ((t >> 1u) & 1u) * 4u; }

// Words 0..3: bit pairs, each of two chunks; 4: scales and mins; 5: d and dmin in x.
uvec4 load_staged(WeightRow row, uint n_blocks, uint block, uint i) {
    if (i < 4u) return row_words4(row, block * 64u + i * 16u);
    if (i == 4u) return row_words4(row, n_blocks * 64u + block * 16u);
    return uvec4(row_word(row, n_blocks * 80u + block * 4u, true), 0u, 0u, 0u);
}

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 pairs = staged_of_four(r, t >> 1u);
    const uvec4 scales = staged_word4(r, 4u);
    const vec2 d = unpackHalf2x16(staged_word4(r, 5u).x);
    const uvec2 of_half = t < 4u ? scales.xy : scales.zw;
    // Byte 0 is of the first 16 weights, byte 2 of the second.
    const uint word = ((t & 1u) == 0u ? of_half.x : of_half.y) >> (((t >> 1u) & 1u) * 8u);
    scale = vec4(d.x * float(int(word & 0xFu)), d.y * float(int((word >> 4u) & 0xFu)),
                 d.x * float(int((word >> 16u) & 0xFu)), d.y * float(int((word >> 20u) & 0xFu)));
    const uint shift = (t & 1u) * 4u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = bytes_to_vec4((pairs[i] >> shift) & 0x03030303u);
        q[i + 4u] = bytes_to_vec4((pairs[i] >> (shift + 2u)) & 0x03030303u);
    }
}
