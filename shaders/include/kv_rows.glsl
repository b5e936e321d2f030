// Rows of KV caches as prompts write and read them: f16 with KV_F16, f32 without. A cache holds a region for each sequence,
// [context] rows for each kv head.
// Needs: address.glsl, params.glsl, CACHED_DIM (dims of a row, whole units of 8), N_KV_HEADS, the push constants `context`
// and `n_regions`.
#include "cached_word.glsl"

const uint UNIT_BYTES = 32u / WORD_DIMS, UNIT_RAW = 2u / WORD_DIMS; // bytes and 16-byte words of 8 dims
const uint CACHED_WORDS = CACHED_DIM / WORD_DIMS, CACHED_BYTES = CACHED_WORDS * 4u;

uint row_position(uint row) { return min(params.rows[row].position, context - 1u); }

// Of a sequence's region in a cache; the regions of a cache may be more than 4 GiB together, one of them is less.
uvec2 region_address(uvec2 cache, uint sequence) {
    return address_add_product(cache, min(sequence, n_regions - 1u), N_KV_HEADS * context * CACHED_BYTES);
}

// The first 16 bytes of a unit.
uvec2 unit_address(uvec2 region, uint kv_head, uint position, uint unit) {
    return address_add(region, (kv_head * context + position) * CACHED_BYTES + unit * UNIT_BYTES);
}

// 8 dims of a row, as the cache holds them.
struct RawUnit {
    uvec4 words[UNIT_RAW];
};

RawUnit load_unit(uvec2 address) {
    RawUnit raw;
    [[unroll]] for (uint i = 0u; i < UNIT_RAW; ++i) raw.words[i] = load_words4(address_add(address, i * 16u));
    return raw;
}

#ifdef KV_F16
vec4 decode_low(RawUnit raw) { return vec4(unpackHalf2x16(raw.words[0].x), unpackHalf2x16(raw.words[0].y)); }
vec4 decode_high(RawUnit raw) { return vec4(unpackHalf2x16(raw.words[0].z), unpackHalf2x16(raw.words[0].w)); }
#else
vec4 decode_low(RawUnit raw) { return uintBitsToFloat(raw.words[0]); }
vec4 decode_high(RawUnit raw) { return uintBitsToFloat(raw.words[1]); }
#endif
