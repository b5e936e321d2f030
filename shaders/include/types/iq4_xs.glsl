// IQ4_XS in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of nibbles (n x 8 uvec4) and
// headers (n x 8 bytes: d (f16), the upper two bits of eight scales, their low nibbles). Chunk t: low nibbles of word t are
// weights 32*t ..+15, high ones the next 16. weight = d*(scale - 32)*value(q).
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 1
#define COMMON_WORDS4 0
#define PART_WORDS4 0
#define SINGLE_WORDS 2
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

uint own_offset(uint n_blocks, uint block, uint t) { return block * 128u + t * 16u; }
uint single_offset(uint n_blocks, uint block, uint i) { return n_blocks * 128u + block * 8u + i * 4u; }
bool is_first_of_single(uint block, uint i) { return true; }

#include "types/iq4_values.glsl"

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = chunk.own[0];
    const uvec2 header = uvec2(chunk.single[0], chunk.single[1]);
    const uint level = ((header.y >> (t * 4u)) & 0xFu) | (((header.x >> (16u + t * 2u)) & 3u) << 4u);
    const float d = unpackHalf2x16(header.x).x * float(int(level) - 32);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = iq4_values(nibbles[i] & 0x0F0F0F0Fu);
        q[i + 4u] = iq4_values((nibbles[i] >> 4u) & 0x0F0F0F0Fu);
    }
}
