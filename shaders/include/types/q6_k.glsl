// Q6_K in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes ql (n x 8 uvec4), qh (n x 4),
// scales (n x 1, int8), d (n x f16). Chunk t: low nibbles of ql word t are weights 128*(t/4) + 32*((t%4)/2) + 16*(t%2) ..+15,
// high nibbles the same + 64. weight = d*scale*(q - 32).
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 1
#define COMMON_WORDS4 1
#define PART_WORDS4 4
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 16u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 3u) * 4u; }

uint own_offset(uint n_blocks, uint block, uint t) { return block * 128u + t * 16u; }
uint part_offset(uint n_blocks, uint block) { return n_blocks * 128u + block * 64u; }
uint part_of(uint t) { return (t >> 2u) * 2u + (t & 1u); }
bool is_first_of_part(uint t) { return (t & 2u) == 0u; }
uint common_offset(uint n_blocks, uint block) { return n_blocks * 192u + block * 16u; }
uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 208u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const uvec4 high = chunk.part;
    const uint shift = t & 2u;  // of the low nibbles' bits: which 32 weights they are; the high ones are two further
    const uvec4 scales = chunk.common_word;
    const uint of_low = t < 4u ? scales.x : scales.z, of_high = t < 4u ? scales.y : scales.w;
    const int byte_shift = int(t & 3u) * 8;
    const float d = half_of_pair(chunk.single[0], block);
    scale = vec4(d * float(bitfieldExtract(int(of_low), byte_shift, 8)), 0.0,
                 d * float(bitfieldExtract(int(of_high), byte_shift, 8)), 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = -32.0 + bytes_to_vec4((nibbles[i] & 0x0F0F0F0Fu) | (((high[i] >> shift) & 0x03030303u) << 4u));
        q[i + 4u] = -32.0 + bytes_to_vec4(((nibbles[i] >> 4u) & 0x0F0F0F0Fu) | (((high[i] >> (shift + 4u)) & 0x03030303u) << 4u));
    }
}
