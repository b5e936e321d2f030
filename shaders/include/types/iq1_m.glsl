// IQ1_M in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of iq1_values.glsl and scales (n x 8
// bytes: four half words, whose upper nibbles are d (f16), the rest four scales of three bits, each of 16 weights). A nibble of
// chunk t's half word has three upper bits of an index, and the sign of its shift.
// weight = d*(2*scale + 1)*(q + shift), shift = 1/8 or -1/8.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 2
#define PART_WORDS4 1
#define SINGLE_WORDS 2
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"
#include "types/iq1_values.glsl"

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 48u + block * 8u + i * 4u; }
bool is_first_of_single(uint block, uint i) { return true; }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uint indices = iq1_indices(chunk, t), own = iq1_upper(chunk, t);
    const uvec2 scales = uvec2(chunk.single[0], chunk.single[1]);
    const uint half_bits = ((scales.x >> 12u) & 0xFu) | ((scales.x >> 24u) & 0xF0u) | ((scales.y >> 4u) & 0xF00u)
                           | ((scales.y >> 16u) & 0xF000u);
    const float d = unpackHalf2x16(half_bits).x;
    const uint levels = (t < 4u ? scales.x : scales.y) >> (((t >> 1u) & 1u) * 16u + (t & 1u) * 6u);
    scale = vec4(d * float(int(2u * (levels & 7u) + 1u)), 0.0, d * float(int(2u * ((levels >> 3u) & 7u) + 1u)), 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uint upper = own >> (4u * i);
        const float shift = (upper & 8u) == 0u ? -0.875 : -1.125;
        vec4 first, last;
        iq1_codes(((indices >> (8u * i)) & 0xFFu) | ((upper & 7u) << 8u), first, last);
        q[2u * i] = first + shift;
        q[2u * i + 1u] = last + shift;
    }
}
