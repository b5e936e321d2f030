// Q5_K: 256 weights in 176 bytes, raw GGUF layout: the header of Q4_K, two uvec4 of high bits (bit j of byte l belongs
// to weight 32*j + l), eight uvec4 of nibbles placed as in Q4_K. weight = d*scale*q - dmin*min.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 1
#define COMMON_WORDS4 1
#define PART_WORDS4 2
#define SINGLE_WORDS 0
#define GROUP_B_OFFSET 8u
#define HAS_MIN
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 1u) * 16u + (t & 1u) * 4u; }

uint own_offset(uint n_blocks, uint block, uint t) { return block * 176u + 48u + t * 16u; }
uint common_offset(uint n_blocks, uint block) { return block * 176u; }
uint part_offset(uint n_blocks, uint block) { return block * 176u + 16u; }
uint part_of(uint t) { return t & 1u; }
bool is_first_of_part(uint t) { return t < 2u; }

#include "types/k_header.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const uvec4 high = chunk.part;
    const uint bit = (t >> 1u) * 2u;
    scale = k_quant_scales(chunk.common_word, t);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = bytes_to_vec4((nibbles[i] & 0x0F0F0F0Fu) | (((high[i] >> bit) & 0x01010101u) << 4u));
        q[i + 4u] = bytes_to_vec4(((nibbles[i] >> 4u) & 0x0F0F0F0Fu) | (((high[i] >> (bit + 1u)) & 0x01010101u) << 4u));
    }
}
