// The quantised type of this variant, chosen by one define (TYPE_Q4_K, ...). Every type file provides
//   BLOCK_CHUNKS      chunks of 32 weights in a block
//   STAGED_WORDS4     uvec4 words of a block that all its chunks need (scales, high bits)
//   HAS_STAGED        defined when that is not zero
//   GROUP_B_OFFSET    distance of a chunk's second 16 weights from its first, in vec4 of activations
//   HAS_MIN           defined when weights have a min term
//   Q_UNIT            defined when values of q are given as q/Q_UNIT
//   HAS_CODE_BOOK     defined when all lanes must call fill_code_book first; only where SHARED_CODE_BOOK is
//   chunk_x(block, t)                        index of the first activation of chunk t, in vec4
//   load_staged(row, n_blocks, block, i)     staged word i of a block
//   unpack_chunk(row, n_blocks, block, t, r, q, scale)  reads what is not staged, each word for one chunk only
//       q: 32 values; scale: (scale a, min a, scale b, min b); weight = scale*q - min, a for q[0..3], b for q[4..7]
// Needs: weight_row.glsl, and staged_word4(r, i), which returns staged word i of the block at hand of dot r.

// Four bytes below 128 as floats. Signed: CPUs convert signed integers in one instruction, unsigned ones in many.
vec4 bytes_to_vec4(uint word) {
    return vec4(ivec4(word & 0xFFu, (word >> 8u) & 0xFFu, (word >> 16u) & 0xFFu, word >> 24u));
}

// The f16 of a block in a word that it shares with its neighbour.
float half_of_pair(uint pair, uint block) {
    const vec2 both = unpackHalf2x16(pair);
    return (block & 1u) == 0u ? both.x : both.y;
}

// Staged word i < 4 of the block at hand of dot r. Indices are constants where the words are in registers.
uvec4 staged_of_four(uint r, uint i) {
#ifdef BLOCK_PER_LANE
    const uvec4 lower = i == 0u ? staged_word4(r, 0u) : staged_word4(r, 1u);
    const uvec4 upper = i == 2u ? staged_word4(r, 2u) : staged_word4(r, 3u);
    return i < 2u ? lower : upper;
#else
    return staged_word4(r, i);
#endif
}

#if defined(TYPE_Q4_K)
#include "types/q4_k.glsl"
#elif defined(TYPE_Q5_K)
#include "types/q5_k.glsl"
#elif defined(TYPE_Q6_K)
#include "types/q6_k.glsl"
#elif defined(TYPE_Q8_0)
#include "types/q8_0.glsl"
#elif defined(TYPE_Q2_K)
#include "types/q2_k.glsl"
#elif defined(TYPE_Q3_K)
#include "types/q3_k.glsl"
#elif defined(TYPE_Q4_0)
#include "types/q4_0.glsl"
#elif defined(TYPE_IQ4_NL)
#include "types/iq4_nl.glsl"
#elif defined(TYPE_IQ4_XS)
#include "types/iq4_xs.glsl"
#elif defined(TYPE_MXFP4)
#include "types/mxfp4.glsl"
#elif defined(TYPE_F16)
#include "types/f16.glsl"
#elif defined(TYPE_BF16)
#include "types/bf16.glsl"
#elif defined(TYPE_F32)
#include "types/f32.glsl"
#else
#error "no weight type is defined"
#endif
