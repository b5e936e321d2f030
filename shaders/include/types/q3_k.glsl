// Q3_K in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of bit pairs (n x 4 uvec4, placed
// as in Q2_K), third bits (n x 2; bit 4*h + j of byte l of word p belongs to weight 128*h + 32*j + 16*p + l), scales
// (n x 12 bytes) and d (n x f16). Chunks are those of Q2_K. weight = d*(scale - 32)*(q - 4).
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 2
#define PART_WORDS4 4
#define SINGLE_WORDS 4
#define GROUP_B_OFFSET 8u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 1u) * 16u + ((t >> 1u) & 1u) * 4u; }

uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }

// Third bits.
uint common_offset(uint n_blocks, uint block) { return n_blocks * 64u + block * 32u; }
uint common_of(uint t) { return (t >> 1u) & 1u; }
bool is_first_of_common(uint t) { return (t & ~2u) == 0u; }

// Twelve bytes of scales, and d.
uint single_offset(uint n_blocks, uint block, uint i) {
    return i < 3u ? n_blocks * 96u + block * 12u + i * 4u : n_blocks * 108u + pair_offset(block);
}
bool is_first_of_single(uint block, uint i) { return i < 3u || is_first_of_pair(block); }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 pairs = chunk.part;
    const uvec4 third = chunk.common_word;
    const uint header[4] = chunk.single;
    const float d = half_of_pair(header[3], block);
    const uint nibble = t & 4u, shift = (t & 1u) * 2u;  // the second half of the weights has the high nibbles
    const uint low = (((t & 1u) == 0u ? header[0] : header[1]) >> nibble) & 0x0F0F0F0Fu;
    // Six-bit scales; byte 0 is of the first 16 weights, byte 2 of the second.
    const uint levels = (low | (((header[2] >> (nibble + shift)) & 0x03030303u) << 4u)) >> (((t >> 1u) & 1u) * 8u);
    scale = vec4(d * float(int(levels & 0xFFu) - 32), 0.0, d * float(int((levels >> 16u) & 0xFFu) - 32), 0.0);
    const uint bit = nibble + shift;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uint low_bits = pairs[i] >> (2u * shift), high_bits = third[i] >> bit;
        q[i] = -4.0 + bytes_to_vec4((low_bits & 0x03030303u) | ((high_bits & 0x01010101u) << 2u));
        q[i + 4u] = -4.0 + bytes_to_vec4(((low_bits >> 2u) & 0x03030303u) | ((high_bits << 1u) & 0x04040404u));
    }
}
