// IQ4_XS in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of nibbles (n x 8 uvec4) and
// headers (n x 8 bytes: d (f16), the upper two bits of eight scales, their low nibbles). Chunk t: low nibbles of word t are
// weights 32*t ..+15, high ones the next 16. weight = d*(scale - 32)*value(q).
#define BLOCK_CHUNKS 8u
#define STAGED_WORDS4 1u
#define HAS_STAGED
#define GROUP_B_OFFSET 4u

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

uvec4 load_staged(WeightRow row, uint n_blocks, uint block, uint i) {
    const uint header = n_blocks * 128u + block * 8u;
    return uvec4(row_word(row, header, true), row_word(row, header + 4u, true), 0u, 0u);
}

#include "types/iq4_values.glsl"

void unpack_chunk(WeightRow row, uint n_blocks, uint block, uint t, uint r, precise out vec4 q[8], precise out vec4 scale) {
    const uvec4 nibbles = row_words4(row, block * 128u + t * 16u);
    const uvec4 header = staged_word4(r, 0u);
    const uint level = ((header.y >> (t * 4u)) & 0xFu) | (((header.x >> (16u + t * 2u)) & 3u) << 4u);
    const float d = unpackHalf2x16(header.x).x * float(int(level) - 32);
    scale = vec4(d, 0.0, d, 0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = iq4_values(nibbles[i] & 0x0F0F0F0Fu);
        q[i + 4u] = iq4_values((nibbles[i] >> 4u) & 0x0F0F0F0Fu);
    }
}
