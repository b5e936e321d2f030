// TQ1_0 in the device layout (vkmoe/quants/layouts.py): per row of n superblocks the planes of trits (n x 1 uvec4, n x 2), the last
// trits (n x 4 bytes) and d (n x f16). A byte holds five numbers below 3, or four in the last: number i is the whole part of
// three times (byte * 3^i modulo 256) / 256. Numbers i of the first 32 bytes are weights 32*i ..+31, those of the next 16 bytes
// weights 160 + 16*i ..+15, those of the last four weights 240 + 4*i ..+3. weight = d*(number - 1).
#define BLOCK_CHUNKS 8u
#define OWN_WORDS4 0
#define COMMON_WORDS4 1
#define PART_WORDS4 2
#define SINGLE_WORDS 2
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 64u + t * 8u; }

// The first word of trits; chunks from the fifth on do not need it.
uint common_offset(uint n_blocks, uint block) { return block * 16u; }

// The second word, or the third.
uint part_offset(uint n_blocks, uint block) { return n_blocks * 16u + block * 32u; }
uint part_of(uint t) { return t < 5u ? 0u : 1u; }
bool is_first_of_part(uint t) { return t == 0u || t == 5u; }

// The last four bytes, and d.
uint single_offset(uint n_blocks, uint block, uint i) {
    return i == 0u ? n_blocks * 48u + block * 4u : n_blocks * 52u + pair_offset(block);
}
bool is_first_of_single(uint block, uint i) { return i == 0u || is_first_of_pair(block); }

// The same trit of a word's four bytes, less 1: what three times a byte carries into the byte above.
vec4 trits(uint word, uint power) {
    const uint even = ((word & 0x00FF00FFu) * power & 0x00FF00FFu) * 3u;
    const uint odd = (((word >> 8u) & 0x00FF00FFu) * power & 0x00FF00FFu) * 3u;
    return -1.0 + vec4(ivec4((even >> 8u) & 0xFFu, (odd >> 8u) & 0xFFu, even >> 24u, odd >> 24u));
}

uint power_of_3(uint i) { return i < 2u ? 1u + 2u * i : i == 2u ? 9u : i == 3u ? 27u : 81u; }

void unpack_chunk(WeightChunk chunk, uint block, uint t, precise out vec4 q[8], precise out vec4 scale) {
    const float d = half_of_pair(chunk.single[1], block);
    scale = vec4(d, 0.0, d, 0.0);
    // Chunks of the third word have two of its trits.
    const uint trit = t < 5u ? t : 2u * (t - 5u);
    const uint power = power_of_3(trit), next = power_of_3(t < 5u ? t : trit + 1u);
    const uvec4 last = chunk.part;
    const uvec4 first = t < 5u ? chunk.common_word : last;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        q[i] = trits(first[i], power);
        q[i + 4u] = trits(t < 7u ? last[i] : chunk.single[0], t < 7u ? next : power_of_3(i));
    }
}
