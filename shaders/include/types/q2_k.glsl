// Q2_K in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of bit pairs (n x 4 uvec4),
// scales (n x 16 bytes: scale in the low nibble, min in the high one), d and dmin (n x 2 f16). Bits 2*j and 2*j + 1 of byte
// l of word 2*h + p are weight 128*h + 32*j + 16*p + l. Chunk t: of word t/2 j = 2*(t%2), then the next j.
// weight = d*scale*q - dmin*min.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 1
#define PART_WORDS4 4
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 8u
#define HAS_MIN
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + (t >> 2u) * 32u + (t & 1u) * 16u + ((t >> 1u) & 1u) * 4u; }

uint part_offset(uint n_blocks, uint block) { return block * 64u; }
uint part_of(uint t) { return t >> 1u; }
bool is_first_of_part(uint t) { return (t & 1u) == 0u; }
uint common_offset(uint n_blocks, uint block) { return n_blocks * 64u + block * 16u; }
uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 80u + block * 4u; }
bool is_first_of_single(uint block, uint i) { return true; }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 pairs = chunk.part;
    const uvec4 scales = chunk.common_word;
    const vec2 d = unpackHalf2x16(chunk.single[0]);
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
