// MXFP4 in the device layout (vkmoe/quants/layouts.py): per row of n blocks of 32 the planes of nibbles (n x 1 uvec4; low
// ones are weights 0..15, high ones 16..31) and exponents e (n x 1 byte). A nibble is E2M1: sign, two bits of exponent, one
// of mantissa; q is twice its value. weight = 2^(e - 128)*q. One chunk is one block.
#define OWN_WORDS4 1
#define SINGLE_WORDS 1
#include "types/one_chunk.glsl"

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 16u + quad_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_quad(block); }

#include "types/e2m1.glsl"

// The exponents 0 and 1 give subnormal numbers, which a device may take for zero; 255 is a number here.
float exponent_scale(uint e) { return uintBitsToFloat(e < 2u ? 0x200000u << e : (e - 1u) << 23u); }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const uint exponents = chunk.single[0];
    const float d = exponent_scale((exponents >> ((block & 3u) * 8u)) & 0xFFu);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = e2m1_low(nibbles[i]);
        q[i + 4u] = e2m1_high(nibbles[i]);
    }
}
