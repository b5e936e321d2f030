// NVFP4 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 64 the planes of nibbles (n x 2 uvec4) and scales (n x
// 4 bytes, each of 16 weights), and the scale of the row (f32). Eight bytes have 16 weights: low nibbles are the first eight, high ones the others; q is twice
// the value. A scale is half of UE4M3: four bits of exponent, three of mantissa. weight = scale*row scale*q.
#define BLOCK_CHUNKS 2u
#define OWN_WORDS4 1
#define COMMON_WORDS4 0
#define PART_WORDS4 0
#define SINGLE_WORDS 2
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 16u + t * 8u; }

uint own_offset(uint n_blocks, uint block, uint t) { return block * 32u + t * 16u; }
uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 32u + (i == 0u ? block : n_blocks) * 4u; }
bool is_first_of_single(uint block, uint i) { return i == 0u || block == 0u; }

#include "types/e2m1.glsl"

// Half of two scales, in the lower two bytes of a word. Four bits of exponent fit in an f16 that is smaller by 2^8; those of
// the smallest scales are subnormal in both.
vec2 halves_of_ue4m3(uint codes) {
    const uint first = codes & 0xFFu, last = (codes >> 8u) & 0xFFu;
    precise vec2 scales = 128.0 * unpackHalf2x16(((first & 0x7Fu) << 7u) | ((last & 0x7Fu) << 23u));
    return vec2(first == 0x7Fu ? 0.0 : scales.x, last == 0x7Fu ? 0.0 : scales.y);  // 0x7F: not a number
}

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const vec2 halves = halves_of_ue4m3(chunk.single[0] >> (t * 16u));
    scale = vec4(halves.x, 0.0, halves.y, 0.0) * uintBitsToFloat(chunk.single[1]);
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        [[unroll]] for (uint k = 0u; k < 2u; ++k) {
            q[4u * i + k] = e2m1_low(nibbles[2u * i + k]);
            q[4u * i + 2u + k] = e2m1_high(nibbles[2u * i + k]);
        }
    }
}
