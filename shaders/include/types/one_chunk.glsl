// What types share whose block is one chunk: 32 weights in their order, no word that other chunks of the block need too.
// Needs: OWN_WORDS4, SINGLE_WORDS.
#define BLOCK_CHUNKS 1u
#define COMMON_WORDS4 0
#define PART_WORDS4 0
#define GROUP_B_OFFSET 4u
#include "weight_chunk.glsl"

uint chunk_x(uint block, uint t) { return block * 8u; }

uint own_offset(uint n_blocks, uint block, uint t) { return block * OWN_WORDS4 * 16u; }
