// A row of weights reached by address, as the type files read it, and the biases of an expert. With KEEP a row may also have
// a landing place: then every word is stored there by the lane that reads it. Kernels read each word of a matrix once, so
// each is stored once.
// Needs: address.glsl.
#ifdef KEEP
#include "store.glsl"

struct WeightRow {
    uvec2 address;
    uvec2 landing;  // of the same row; null: it is not stored
};

uvec4 row_words4(WeightRow row, uint offset) {
    const uvec4 words = load_words4(address_add(row.address, offset));
    if (!is_null(row.landing)) store_words4(address_add(row.landing, offset), words);
    return words;
}

// One word of 4 bytes. Of several lanes that read the same word, one must have it stored.
uint row_word(WeightRow row, uint offset, bool stored) {
    const uint word = load_word(address_add(row.address, offset));
    if (stored && !is_null(row.landing)) store_word(address_add(row.landing, offset), word);
    return word;
}
#else
#define WeightRow uvec2

uvec4 row_words4(WeightRow row, uint offset) { return load_words4(address_add(row, offset)); }

uint row_word(WeightRow row, uint offset, bool stored) { return load_word(address_add(row, offset)); }
#endif

// The word that a block shares with its neighbour (2 bytes each, in planes), or with three (1 byte). The first stores it.
uint row_pair(WeightRow row, uint offset, uint block) { return row_word(row, offset + (block >> 1u) * 4u, (block & 1u) == 0u); }
uint row_quad(WeightRow row, uint offset, uint block) { return row_word(row, offset + (block & ~3u), (block & 3u) == 0u); }

// A row of the matrix that begins `offset` bytes into a span. Rows behind the last are the last once more, not stored.
WeightRow span_row(uvec2 span, uvec2 landing, uint offset, uint row, uint n_rows, uint row_bytes) {
    const uint clamped = min(row, n_rows - 1u);
    const uvec2 address = address_add_product(address_add(span, offset), clamped, row_bytes);
#ifdef KEEP
    const bool stored = row < n_rows && !is_null(landing);
    return WeightRow(address, stored ? address_add_product(address_add(landing, offset), clamped, row_bytes) : uvec2(0u));
#else
    return address;
#endif
}

// Bias `row` of those that begin `offset` bytes into a span.
float span_bias(uvec2 span, uvec2 landing, uint offset, uint row) {
    const uint at = offset + row * 4u;
    const uint word = load_word(address_add(span, at));
#ifdef KEEP
    if (!is_null(landing)) store_word(address_add(landing, at), word);
#endif
    return uintBitsToFloat(word);
}
