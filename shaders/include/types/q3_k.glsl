// Q3_K in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of bit pairs (n x 4 uvec4, placed
// as in Q2_K), third bits (n x 2; bit 4*h + j of byte l of word p belongs to weight 128*h + 32*j + 16*p + l), scales
// (n x 12 bytes) and d (n x f16). Chunks are those of Q2_K. weight = d*(scale - 32)*(q - 4).
#define BLOCK_CHUNKS 8u
#define STAGED_WORDS4 7u
#define HAS_STAGED
#define GROUP_B_OFFSET 8u

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 1u) * 16u + ((t >> 1u) & 1u) * 4u; }

// Words 0..3: bit pairs, each of two chunks; 4 and 5: third bits; 6: twelve bytes of scales, and d in the low half of w.
uvec4 load_staged(WeightRow row, uint n_blocks, uint block, uint i) {
    if (i < 4u) return row_words4(row, block * 64u + i * 16u);
    if (i < 6u) return row_words4(row, n_blocks * 64u + block * 32u + (i - 4u) * 16u);
    const uint scales = n_blocks * 96u + block * 12u;
    const uint pair = row_pair(row, n_blocks * 108u, block);
    return uvec4(row_word(row, scales, true), row_word(row, scales + 4u, true), row_word(row, scales + 8u, true),
                 (block & 1u) == 0u ? pair : pair >> 16u);
}

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 pairs = staged_of_four(r, t >> 1u);
    const uvec4 third = (t & 2u) == 0u ? staged_word4(r, 4u) : staged_word4(r, 5u);
    const uvec4 header = staged_word4(r, 6u);
    const float d = unpackHalf2x16(header.w).x;
    const uint nibble = t & 4u, shift = (t & 1u) * 2u;  // the second half of the weights has the high nibbles
    const uint low = (((t & 1u) == 0u ? header.x : header.y) >> nibble) & 0x0F0F0F0Fu;
    // Six-bit scales; byte 0 is of the first 16 weights, byte 2 of the second.
    const uint levels = (low | (((header.z >> (nibble + shift)) & 0x03030303u) << 4u)) >> (((t >> 1u) & 1u) * 8u);
    scale = vec4(d * float(int(levels & 0xFFu) - 32), 0.0, d * float(int((levels >> 16u) & 0xFFu) - 32), 0.0);
    const uint bit = nibble + shift;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = -4.0 + bytes_to_vec4(((pairs[i] >> (2u * shift)) & 0x03030303u) | (((third[i] >> bit) & 0x01010101u) << 2u));
        q[i + 4u] = -4.0 + bytes_to_vec4(((pairs[i] >> (2u * shift + 2u)) & 0x03030303u) |
                                         (((third[i] >> (bit + 1u)) & 0x01010101u) << 2u));
    }
}
