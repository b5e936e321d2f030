// A row's block as a lane holds it that walks along whole blocks: the words that its chunks share are loaded once.
// Needs: weights.glsl.
#if PART_WORDS4 == 2
uvec4 picked_part(uvec4 parts[PART_WORDS4], uint i) { return i == 0u ? parts[0] : parts[1]; }
#elif PART_WORDS4 == 4
// By constant indices: the words are in registers.
uvec4 picked_part(uvec4 parts[PART_WORDS4], uint i) {
    const uvec4 lower = i == 0u ? parts[0] : parts[1];
    const uvec4 upper = i == 2u ? parts[2] : parts[3];
    return i < 2u ? lower : upper;
}
#endif

// What this lane has of a row's block.
struct BlockRow {
    WeightRow row;
    uvec4 parts[OR_ONE(PART_WORDS4)];
    WeightChunk chunk;
};

void load_block_row(uint n_blocks, uint block, inout BlockRow r) {
    load_block(r.row, n_blocks, block, r.chunk.of_block);
#if PART_WORDS4 > 0
    [[unroll]] for (uint i = 0u; i < PART_WORDS4; ++i) r.parts[i] = row_words4(r.row, part_offset(n_blocks, block) + i * 16u);
#endif
#ifdef KEEP
    keep_block(r.row, n_blocks, block, r.chunk.of_block);
#if PART_WORDS4 > 0
    if (is_null(r.row.landing)) return;
    [[unroll]] for (uint i = 0u; i < PART_WORDS4; ++i) keep_words4(r.row, part_offset(n_blocks, block) + i * 16u, r.parts[i]);
#endif
#endif
}

void next_chunk(uint n_blocks, uint block, uint t, inout BlockRow r) {
    load_own(r.row, n_blocks, block, t, r.chunk);
#ifdef KEEP
    keep_own(r.row, n_blocks, block, t, r.chunk);
#endif
#if PART_WORDS4 > 0
    r.chunk.part = picked_part(r.parts, part_of(t));
#endif
}
