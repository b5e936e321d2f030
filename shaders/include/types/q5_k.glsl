// Q5_K: 256 weights in 176 bytes, raw GGUF layout: the header of Q4_K, two uvec4 of high bits (bit j of byte l belongs
// to weight 32*j + l), eight uvec4 of nibbles placed as in Q4_K. weight = d*scale*q - dmin*min.
#define BLOCK_CHUNKS 8u
#define STAGED_WORDS4 3u
#define HAS_STAGED
#define GROUP_B_OFFSET 8u
#define HAS_MIN

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 1u) * 16u + (t & 1u) * 4u; }

uvec4 load_staged(WeightRow row, uint n_blocks, uint block, uint i) {
    return row_words4(row, block * 176u + i * 16u);
}

#include "types/k_header.glsl"

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = row_words4(row, block * 176u + 48u + t * 16u);
    const uvec4 high = (t & 1u) == 0u ? staged_word4(r, 1u) : staged_word4(r, 2u);
    const uint bit = (t >> 1u) * 2u;
    scale = k_quant_scales(staged_word4(r, 0u), t);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = bytes_to_vec4((nibbles[i] & 0x0F0F0F0Fu) | (((high[i] >> bit) & 0x01010101u) << 4u));
        q[i + 4u] = bytes_to_vec4(((nibbles[i] >> 4u) & 0x0F0F0F0Fu) | (((high[i] >> (bit + 1u)) & 0x01010101u) << 4u));
    }
}
