// A row's block as a lane holds it that walks along whole blocks: the words that its chunks share are loaded once.
// Needs: weights.glsl.

// What this lane has of a row's block.
struct BlockRow {
    WeightRow row;
    uvec4 common_words[OR_ONE(COMMON_WORDS4)];
    uvec4 parts[OR_ONE(PART_WORDS4)];
    WeightChunk chunk;
};

void load_block_row(uint n_blocks, uint block, inout BlockRow r) {
#if COMMON_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < COMMON_WORDS4; ++i)
        r.common_words[i] = row_words4(r.row, common_offset(n_blocks, block) + i * 16u);
#endif
    load_single(r.row, n_blocks, block, r.chunk);
#if PART_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < PART_WORDS4; ++i) r.parts[i] = row_words4(r.row, part_offset(n_blocks, block) + i * 16u);
#endif
#ifdef KEEP
    if (is_null(r.row.landing)) return;
#if COMMON_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < COMMON_WORDS4; ++i)
        keep_words4(r.row, common_offset(n_blocks, block) + i * 16u, r.common_words[i]);
#endif
    keep_single(r.row, n_blocks, block, r.chunk);
#if PART_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < PART_WORDS4; ++i) keep_words4(r.row, part_offset(n_blocks, block) + i * 16u, r.parts[i]);
#endif
#endif
}

// By constant indices: the words are in registers.
uvec4 picked(uvec4 first, uvec4 second, uint i) { return i == 0u ? first : second; }

void pick_shared_words(uint t, inout BlockRow r) {
#if COMMON_WORDS4 == 1
    r.chunk.common_word = r.common_words[0];
#elif COMMON_WORDS4 == 2
    r.chunk.common_word = picked(r.common_words[0], r.common_words[1], common_of(t));
#elif COMMON_WORDS4 == 3
    r.chunk.common_word = picked(r.common_words[0], picked(r.common_words[1], r.common_words[2], common_of(t) - 1u), common_of(t));
#endif
#if PART_WORDS4 == 1
    r.chunk.part = r.parts[0];
#elif PART_WORDS4 == 2
    r.chunk.part = picked(r.parts[0], r.parts[1], part_of(t));
#elif PART_WORDS4 == 4
    const uint i = part_of(t);
    r.chunk.part = i < 2u ? picked(r.parts[0], r.parts[1], i) : picked(r.parts[2], r.parts[3], i - 2u);
#endif
}

void next_chunk(uint n_blocks, uint block, uint t, inout BlockRow r) {
    load_own(r.row, n_blocks, block, t, r.chunk);
#ifdef KEEP
    keep_own(r.row, n_blocks, block, t, r.chunk);
#endif
    pick_shared_words(t, r);
}
