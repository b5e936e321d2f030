// A matrix of weights reached by address, or a place in it. With KEEP it may also have a landing place, where the words that
// are loaded from it are stored, each by one lane.
// Needs: address.glsl.
#ifdef KEEP
#include "store.glsl"

struct WeightRow {
    Address address;
    Address landing;  // of the same bytes; null: they are not stored
};

WeightRow weight_row(uvec2 address, uvec2 landing) { return WeightRow(to_address(address), to_address(landing)); }

WeightRow row_add(WeightRow row, uint bytes) {
    return WeightRow(address_add(row.address, bytes), is_null(row.landing) ? row.landing : address_add(row.landing, bytes));
}

uvec4 row_words4(WeightRow row, uint offset) { return load_words4(address_add(row.address, offset)); }
uint row_word(WeightRow row, uint offset) { return load_word(address_add(row.address, offset)); }
void keep_words4(WeightRow row, uint offset, uvec4 words) { store_words4(address_add(row.landing, offset), words); }
void keep_word(WeightRow row, uint offset, uint word) { store_word(address_add(row.landing, offset), word); }
#else
#define WeightRow Address

WeightRow weight_row(uvec2 address, uvec2 landing) { return to_address(address); }
WeightRow row_add(WeightRow row, uint bytes) { return address_add(row, bytes); }
uvec4 row_words4(WeightRow row, uint offset) { return load_words4(address_add(row, offset)); }
uint row_word(WeightRow row, uint offset) { return load_word(address_add(row, offset)); }
#endif

// A row of a matrix. Rows behind the last are the last once more, not stored.
WeightRow matrix_row(WeightRow matrix, uint row, uint n_rows, uint row_bytes) {
    const uint clamped = min(row, n_rows - 1u);
#ifdef KEEP
    const bool stored = row < n_rows && !is_null(matrix.landing);
    return WeightRow(address_add_product(matrix.address, clamped, row_bytes),
                     stored ? address_add_product(matrix.landing, clamped, row_bytes) : to_address(uvec2(0u)));
#else
    return address_add_product(matrix, clamped, row_bytes);
#endif
}

// Bias `row` of those that begin `offset` bytes into a span.
float span_bias(WeightRow span, uint offset, uint row) {
    const uint at = offset + row * 4u;
    const uint word = row_word(span, at);
#ifdef KEEP
    if (!is_null(span.landing)) keep_word(span, at, word);
#endif
    return uintBitsToFloat(word);
}
