// A row on its way into a q8_0 cache: its dims are staged, then the scales of its blocks are found, then words are made of both.
// Needs: kv_types.glsl.
shared float staged[K_TYPE == Q8_0 || V_TYPE == Q8_0 ? CACHED_DIM : 1u];
shared uint scales[K_TYPE == Q8_0 || V_TYPE == Q8_0 ? N_BLOCKS + 1u : 1u]; // the last one is 0, for a word with one scale

void find_scales() {
    barrier(); // the row is staged
    for (uint block = gl_LocalInvocationIndex; block <= N_BLOCKS; block += gl_WorkGroupSize.x) {
        uint largest = 0u;
        const uint first = block * BLOCK_DIMS, end = min(first + BLOCK_DIMS, CACHED_DIM);
        for (uint d = first; d < end; ++d) largest = max(largest, magnitude_bits(staged[d]));
        scales[block] = block_scale(largest);
    }
    barrier();
}

// Stores the staged row. Every invocation must call it; afterwards another row may be staged.
void append_staged(uvec2 region, uint row) {
    find_scales();
    for (uint word = gl_LocalInvocationIndex; word < row_words(Q8_0); word += gl_WorkGroupSize.x) {
        const uint d = word * 4u;
        const vec4 values = vec4(staged[d], staged[d + 1u], staged[d + 2u], staged[d + 3u]);
        store_row_word(Q8_0, region, row, word, encode(Q8_0, values, scales[d / BLOCK_DIMS]));
    }
    for (uint word = gl_LocalInvocationIndex; word < SCALE_WORDS; word += gl_WorkGroupSize.x)
        store_scale_word(region, row, word, scales[2u * word] | scales[2u * word + 1u] << 16u);
    barrier();
}
