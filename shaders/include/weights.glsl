// The quantised type of this variant, chosen by one define (TYPE_Q4_K, ...): where the words of a chunk of 32 weights lie in a
// row, and what numbers they are. Every type file provides
//   BLOCK_CHUNKS      chunks in a block
//   OWN_WORDS4        16-byte words that chunk t alone needs; if any, own_offset(n_blocks, block, t): where they begin
//   COMMON_WORDS4     16-byte words of a block, of which a chunk needs one; if any, common_offset(n_blocks, block), and if
//                     several, common_of(t): which one, and is_first_of_common(t): t is the first of the chunks that need it
//   PART_WORDS4       the same of a plane that has more of them: part_offset(n_blocks, block), part_of(t), is_first_of_part(t)
//   SINGLE_WORDS      4-byte words that all chunks of a block need; if any, single_offset(n_blocks, block, i), and
//                     is_first_of_single(block, i): this is the first of the blocks that share the word
//   GROUP_B_OFFSET    distance of a chunk's second 16 weights from its first, in vec4 of activations
//   HAS_MIN           defined when weights have a min term
//   Q_UNIT            defined when values of q are given as q/Q_UNIT
//   Q_BIAS            defined when they are given as q + Q_BIAS; only with MATRIX_TILES and without HAS_MIN
//   HAS_CODE_BOOK     defined when all lanes must call fill_code_book first; only where SHARED_CODE_BOOK is
//   chunk_x(block, t)                         index of the first activation of chunk t, in vec4
//   unpack_chunk(chunk, block, t, q, scale)   turns what was loaded into numbers
//       q: 32 values; scale: (scale a, min a, scale b, min b); weight = scale*q - min, a for q[0..3], b for q[4..7]
// Needs: weight_row.glsl. Gives weight_chunk.glsl, which loads chunks.

// Four bytes below 128 as floats. Signed: CPUs convert signed integers in one instruction, unsigned ones in many.
vec4 bytes_to_vec4(uint word) {
    return vec4(ivec4(word & 0xFFu, (word >> 8u) & 0xFFu, (word >> 16u) & 0xFFu, word >> 24u));
}

// The word that a block shares with its neighbour (2 bytes each, in planes), or with three others (1 byte).
uint pair_offset(uint block) { return (block >> 1u) * 4u; }
uint quad_offset(uint block) { return block & ~3u; }
bool is_first_of_pair(uint block) { return (block & 1u) == 0u; }
bool is_first_of_quad(uint block) { return (block & 3u) == 0u; }

// The f16 of a block in a word that it shares with its neighbour.
float half_of_pair(uint pair, uint block) {
    const vec2 both = unpackHalf2x16(pair);
    return is_first_of_pair(block) ? both.x : both.y;
}

// A word by its number, without an index: the words are in registers.
uint word_at(uvec4 words, uint i) {
    const uvec2 pair = i < 2u ? words.xy : words.zw;
    return (i & 1u) == 0u ? pair.x : pair.y;
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
#elif defined(TYPE_Q4_1)
#include "types/q4_1.glsl"
#elif defined(TYPE_Q5_0)
#include "types/q5_0.glsl"
#elif defined(TYPE_Q5_1)
#include "types/q5_1.glsl"
#elif defined(TYPE_IQ1_S)
#include "types/iq1_s.glsl"
#elif defined(TYPE_IQ1_M)
#include "types/iq1_m.glsl"
#elif defined(TYPE_IQ2_XXS)
#include "types/iq2_xxs.glsl"
#elif defined(TYPE_IQ2_XS)
#include "types/iq2_xs.glsl"
#elif defined(TYPE_IQ2_S)
#include "types/iq2_s.glsl"
#elif defined(TYPE_IQ3_XXS)
#include "types/iq3_xxs.glsl"
#elif defined(TYPE_IQ3_S)
#include "types/iq3_s.glsl"
#elif defined(TYPE_TQ1_0)
#include "types/tq1_0.glsl"
#elif defined(TYPE_TQ2_0)
#include "types/tq2_0.glsl"
#elif defined(TYPE_Q1_0)
#include "types/q1_0.glsl"
#elif defined(TYPE_Q2_0)
#include "types/q2_0.glsl"
#elif defined(TYPE_NVFP4)
#include "types/nvfp4.glsl"
#elif defined(TYPE_F16)
#include "types/f16.glsl"
#elif defined(TYPE_BF16)
#include "types/bf16.glsl"
#elif defined(TYPE_F32)
#include "types/f32.glsl"
#else
#error "no weight type is defined"
#endif
