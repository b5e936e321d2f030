// IQ1_S in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of iq1_values.glsl and d (n x f16). The
// half word of chunk t has three upper bits for each of four indices, the scale (three bits), and the sign of the shift.
// weight = d*(2*scale + 1)*(q + shift), shift = 1/8 or -1/8.
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 2
#define PART_WORDS4 1
#define SINGLE_WORDS 1
#define GROUP_B_OFFSET 4u
#define HAS_MIN
#include "weight_chunk.glsl"
#include "types/iq1_values.glsl"

uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 48u + pair_offset(block); }
bool is_first_of_single(uint block, uint i) { return is_first_of_pair(block); }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uint indices = iq1_indices(chunk, t), own = iq1_upper(chunk, t);
    const float d = half_of_pair(chunk.single[0], block) * float(int(2u * ((own >> 12u) & 7u) + 1u));
    const float minimum = d * ((own & 0x8000u) == 0u ? 0.875 : 1.125);
    scale = vec4(d, minimum, d, minimum);
    [[unroll]] for (uint i = 0u; i < 4u; ++i)
        iq1_codes(((indices >> (8u * i)) & 0xFFu) | (((own >> (3u * i)) & 7u) << 8u), q[2u * i], q[2u * i + 1u]);
}
