// TQ2_0 in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of bit pairs (n x 4 uvec4, placed as in
// Q2_K) and d (n x f16). Chunks are those of Q2_K. weight = d*(q - 1).
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 0
#define PART_WORDS4 4
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 8u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 1u) * 16u + ((t >> 1u) & 1u) * 4u; }

uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 64u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 pairs = chunk.part;
    const float d = half_of_pair(chunk.single[0], block);
    scale = vec4(d, 0.0, d, 0.0);
    const uint shift = (t & 1u) * 4u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = -1.0 + bytes_to_vec4((pairs[i] >> shift) & 0x03030303u);
        q[i + 4u] = -1.0 + bytes_to_vec4((pairs[i] >> (shift + 2u)) & 0x03030303u);
    }
}
