// What types share whose block is one chunk: 32 weights in their order, and nothing that other chunks need too.
#define BLOCK_CHUNKS 1u
#define STAGED_WORDS4 0u
#define GROUP_B_OFFSET 4u

uint chunk_x(uint block, uint t) { return block * 8u; }

uvec4 load_staged(WeightRow row, uint n_blocks, uint block, uint i) { return uvec4(0u); }
