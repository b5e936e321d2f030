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

#if COMMON_WORDS4 > 1
uint common_of(uint t);
bool is_first_of_common(uint t);
#else
uint common_of(uint t) { return 0u; }
bool is_first_of_common(uint t) { return t == 0u; }
#endif

// Sizes of arrays must not be zero.
#define OR_ONE(n) ((n) > 0 ? (n) : 1)

struct WeightChunk {
    uint single[OR_ONE(SINGLE_WORDS)];
    uvec4 common_word;  // the one of COMMON_WORDS4 that this chunk needs
    uvec4 part;         // the same of PART_WORDS4
    uvec4 own[OR_ONE(OWN_WORDS4)];
};

void load_single(WeightRow row, uint n_blocks, uint block, inout WeightChunk chunk) {
#if SINGLE_WORDS > 0
    [[unroll]] for (uint i = 0u; i < SINGLE_WORDS; ++i) chunk.single[i] = row_word(row, single_offset(n_blocks, block, i));
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
#if COMMON_WORDS4 > 0
    chunk.common_word = row_words4(row, common_offset(n_blocks, block) + common_of(t) * 16u);
#endif
    load_single(row, n_blocks, block, chunk);
}

#ifdef KEEP
// These store what was loaded of a row that has a landing place.
void keep_single(WeightRow row, uint n_blocks, uint block, WeightChunk chunk) {
#if SINGLE_WORDS > 0
    if (is_null(row.landing)) return;
    // Of several blocks that share a word, the first keeps it.
    [[unroll]] for (uint i = 0u; i < SINGLE_WORDS; ++i) {
        if (is_first_of_single(block, i)) keep_word(row, single_offset(n_blocks, block, i), chunk.single[i]);
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
#if COMMON_WORDS4 > 0
    if (is_first_of_common(t) && !is_null(row.landing))
        keep_words4(row, common_offset(n_blocks, block) + common_of(t) * 16u, chunk.common_word);
#endif
    if (t == 0u) keep_single(row, n_blocks, block, chunk);
}
#endif
