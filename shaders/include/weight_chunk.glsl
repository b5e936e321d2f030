// Chunks of weights as they were loaded. Loading, keeping and unpacking are steps of their own, so that the loads of many
// rows can be on their way before the first is used.
// Needs: weight_row.glsl, and from the type file that includes it what weights.glsl lists.
uint own_offset(uint n_blocks, uint block, uint t);
uint common_offset(uint n_blocks, uint block);
uint part_offset(uint n_blocks, uint block);
uint part_of(uint t);
bool is_first_of_part(uint t);
uint single_offset(uint n_blocks, uint block, uint i);
bool is_first_of_single(uint block, uint i);

// Sizes of arrays must not be zero.
#define OR_ONE(n) ((n) > 0 ? (n) : 1)

// What all chunks of a block need.
struct BlockWords {
    uvec4 common_words[OR_ONE(COMMON_WORDS4)];
    uint single[OR_ONE(SINGLE_WORDS)];
};

struct WeightChunk {
    BlockWords of_block;
    uvec4 part;  // the one of PART_WORDS4 that this chunk needs
    uvec4 own[OR_ONE(OWN_WORDS4)];
};

void load_block(WeightRow row, uint n_blocks, uint block, out BlockWords words) {
#if COMMON_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < COMMON_WORDS4; ++i)
        words.common_words[i] = row_words4(row, common_offset(n_blocks, block) + i * 16u);
#endif
#if SINGLE_WORDS > 0
    [[unroll]] for (uint i = 0u; i < SINGLE_WORDS; ++i) words.single[i] = row_word(row, single_offset(n_blocks, block, i));
#endif
}

void load_own(WeightRow row, uint n_blocks, uint block, uint t, inout WeightChunk chunk) {
#if OWN_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < OWN_WORDS4; ++i)
        chunk.own[i] = row_words4(row, own_offset(n_blocks, block, t) + i * 16u);
#endif
}

// All that chunk t needs; of several lanes that need the same word, each loads it.
void load_chunk(WeightRow row, uint n_blocks, uint block, uint t, out WeightChunk chunk) {
    load_own(row, n_blocks, block, t, chunk);
#if PART_WORDS4 > 0
    chunk.part = row_words4(row, part_offset(n_blocks, block) + part_of(t) * 16u);
#endif
    load_block(row, n_blocks, block, chunk.of_block);
}

#ifdef KEEP
// These store what was loaded of a row that has a landing place.
void keep_block(WeightRow row, uint n_blocks, uint block, BlockWords words) {
    if (is_null(row.landing)) return;
#if COMMON_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < COMMON_WORDS4; ++i)
        keep_words4(row, common_offset(n_blocks, block) + i * 16u, words.common_words[i]);
#endif
#if SINGLE_WORDS > 0
    // Of several blocks that share a word, the first keeps it.
    [[unroll]] for (uint i = 0u; i < SINGLE_WORDS; ++i) {
        if (is_first_of_single(block, i)) keep_word(row, single_offset(n_blocks, block, i), words.single[i]);
    }
#endif
}

void keep_own(WeightRow row, uint n_blocks, uint block, uint t, WeightChunk chunk) {
#if OWN_WORDS4 > 0
    if (is_null(row.landing)) return;
    [[unroll]] for (uint i = 0u; i < OWN_WORDS4; ++i)
        keep_words4(row, own_offset(n_blocks, block, t) + i * 16u, chunk.own[i]);
#endif
}

// Each word once: of several chunks that need it, the first keeps it.
void keep_chunk(WeightRow row, uint n_blocks, uint block, uint t, WeightChunk chunk) {
    keep_own(row, n_blocks, block, t, chunk);
#if PART_WORDS4 > 0
    if (is_first_of_part(t) && !is_null(row.landing))
        keep_words4(row, part_offset(n_blocks, block) + part_of(t) * 16u, chunk.part);
#endif
    if (t == 0u) keep_block(row, n_blocks, block, chunk.of_block);
}
#endif
