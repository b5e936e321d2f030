// A row on its way into a cache with scales: its dims are staged, transformed where its type asks for that, then what its blocks
// share is found, then words are made of both.
// Needs: kv_types.glsl, hadamard.glsl.
shared float staged[K_TYPE >= Q8_0 || V_TYPE >= Q8_0 ? CACHED_DIM : 1u];
shared uint scales[K_TYPE >= Q8_0 || V_TYPE >= Q8_0 ? N_BLOCKS + 1u : 1u]; // the last one is 0, for a word with one scale
shared uint fifth_bits[K_TYPE == Q5_1 || V_TYPE == Q5_1 ? UNITS : 1u];

// Transforms `n` dims at a time.
void transform_staged(uint n) {
    barrier(); // the row is staged
    TRANSFORM(staged, CACHED_DIM, n, gl_LocalInvocationIndex, gl_WorkGroupSize.x)
}

void find_scales(uint type) {
    barrier(); // the row is staged
    for (uint block = gl_LocalInvocationIndex; block <= N_BLOCKS; block += gl_WorkGroupSize.x) {
        Extremes found = NO_DIMS;
        const uint first = block * BLOCK_DIMS, end = min(first + BLOCK_DIMS, CACHED_DIM);
        for (uint d = first; d < end; ++d) found = joined(found, staged[d]);
        scales[block] = block < N_BLOCKS ? block_numbers(type, found) : 0u;
    }
    barrier();
}

void append_words(uint type, uvec2 region, uint row) {
    const uint n_dims = word_dims(type);
    for (uint word = gl_LocalInvocationIndex; word < row_words(type); word += gl_WorkGroupSize.x) {
        const uint d = word * n_dims, more = n_dims == 8u ? d + 4u : d;
        const vec4 low = vec4(staged[d], staged[d + 1u], staged[d + 2u], staged[d + 3u]);
        const vec4 high = vec4(staged[more], staged[more + 1u], staged[more + 2u], staged[more + 3u]);
        const uvec2 made = encode(type, low, high, scales[d / BLOCK_DIMS]);
        store_row_word(type, region, row, word, made.x);
        if (type == Q5_1) fifth_bits[word] = made.y;
    }
}

void append_scales(uint type, uvec2 region, uint row) {
    if (type == Q5_1) barrier(); // the fifth bits are there
    for (uint word = gl_LocalInvocationIndex; word < scale_words(type); word += gl_WorkGroupSize.x) {
        uint bits = 0u;
        if (type != Q5_1) {
            bits = scales[2u * word] | scales[2u * word + 1u] << 16u;
        } else if (word % 2u == 0u) {
            bits = scales[word / 2u];
        } else {
            const uint first = word / 2u * BLOCK_UNITS;
            for (uint unit = first; unit < min(first + BLOCK_UNITS, UNITS); ++unit) bits |= fifth_bits[unit] << 2u * (unit - first);
        }
        store_scale_word(type, region, row, word, bits);
    }
}

// Stores the staged row, of which `n_transformed` dims at a time are transformed (1: none). Every invocation must call it;
// afterwards another row may be staged.
void append_staged(uint type, uint n_transformed, uvec2 region, uint row) {
    if (n_transformed > 1u) transform_staged(n_transformed);
    find_scales(type);
    append_words(type, region, row);
    append_scales(type, region, row);
    barrier();
}
