// Q4_K: 256 weights in 144 bytes, raw GGUF layout. Word 0 of a superblock holds d and dmin (f16) and twelve bytes of
// 6-bit scales and mins; words 1..8 hold nibbles. Chunk t: low nibbles are weights 64*(t/2) + 16*(t%2) ..+15,
// high nibbles the same + 32. weight = d*scale*q - dmin*min.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 1
#define COMMON_WORDS4 1
#define PART_WORDS4 0
#define SINGLE_WORDS 0
#define GROUP_B_OFFSET 8u
#define HAS_MIN
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 1u) * 16u + (t & 1u) * 4u; }

uint own_offset(uint n_blocks, uint block, uint t) { return block * 144u + 16u + t * 16u; }
uint common_offset(uint n_blocks, uint block) { return block * 144u; }

#include "types/k_header.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    scale = k_quant_scales(chunk.common_word, t);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = bytes_to_vec4(nibbles[i] & 0x0F0F0F0Fu);
        q[i + 4u] = bytes_to_vec4((nibbles[i] >> 4u) & 0x0F0F0F0Fu);
    }
}
