// What a region of a KV cache holds, by the cache's type: [N_KV_HEADS][PLACES] rows of CACHED_DIM dims. Each position has a row,
// unless layers that see a window alone have a ring of RING places, a power of two: there it has that of its number modulo RING.
//   f16, f32  the rows, one behind the other.
//   q8_0      blocks of 32 dims with one scale, as ggml's; the last block of a row may be shorter. First the quants of all rows,
//             int8; then the scales of all rows, f16 [blocks], of each row whole words. dim = scale * quant.
// A unit is 8 dims, which a lane loads at once. The host's side: vkmoe/kv_types.py.
// Needs: address.glsl, CACHED_DIM (whole units), N_KV_HEADS, the constants RING, K_TYPE and V_TYPE, the push constants `context` and
// `n_regions`.
#include "half.glsl"

const uint F16 = 0u, F32 = 1u, Q8_0 = 2u; // as vkmoe/kv_types.py numbers them
const uint UNITS = CACHED_DIM / 8u;
const uint BLOCK_UNITS = 4u, BLOCK_DIMS = 32u;
const uint N_BLOCKS = (CACHED_DIM + BLOCK_DIMS - 1u) / BLOCK_DIMS;
const uint SCALE_WORDS = (N_BLOCKS + 1u) / 2u; // of a row
// 16-byte words that a unit takes once it is loaded, in either cache. Of q8_0: its quants in xy, its scale in z.
const uint UNIT_RAW = K_TYPE == F32 || V_TYPE == F32 ? 2u : 1u;

uint raw_words(uint type) { return type == F32 ? 2u : 1u; } // those of them that a type fills
uint word_dims(uint type) { return type == F32 ? 1u : type == F16 ? 2u : 4u; }
uint row_words(uint type) { return CACHED_DIM / word_dims(type); } // without scales
uint row_bytes(uint type) { return row_words(type) * 4u; }
uint unit_bytes(uint type) { return 32u / word_dims(type); }

#define PLACES (RING == 0u ? context : RING)

uint scales_at() { return N_KV_HEADS * PLACES * CACHED_DIM; } // bytes from a region's beginning

uint region_bytes(uint type) {
    if (type != Q8_0) return N_KV_HEADS * PLACES * row_bytes(type);
    return (scales_at() + N_KV_HEADS * PLACES * SCALE_WORDS * 4u + 15u) / 16u * 16u;
}

// Of a sequence's region in a cache; the regions of a cache may be more than 4 GiB together, one of them is less.
uvec2 region_address(uint type, uvec2 cache, uint sequence) {
    return address_add_product(cache, min(sequence, n_regions - 1u), region_bytes(type));
}

// ----- reading; `row` counts from the region's first -----

uint cached_row(uint kv_head, uint position) { return kv_head * PLACES + (RING == 0u ? position : position & (RING - 1u)); }

// One of a unit's 16-byte words.
uvec4 load_raw(uint type, uvec2 region, uint row, uint unit, uint word) {
    if (type != Q8_0) return load_words4(address_add(region, row * row_bytes(type) + unit * unit_bytes(type) + word * 16u));
    const uint pair = load_word(address_add(region, scales_at() + (row * SCALE_WORDS + unit / (2u * BLOCK_UNITS)) * 4u));
    const uvec2 quants = load_words2(address_add(region, row * row_bytes(type) + unit * unit_bytes(type)));
    return uvec4(quants, pair >> unit / BLOCK_UNITS % 2u * 16u, 0u);
}

vec4 signed_bytes(uint word) {
    const int value = int(word);
    return vec4(float(bitfieldExtract(value, 0, 8)), float(bitfieldExtract(value, 8, 8)),
                float(bitfieldExtract(value, 16, 8)), float(bitfieldExtract(value, 24, 8)));
}

// The first and last four dims of a unit; `second` is its second 16-byte word, of f32.
vec4 decode_low(uint type, uvec4 first) {
    if (type == F32) return uintBitsToFloat(first);
    if (type == F16) return vec4(unpackHalf2x16(first.x), unpackHalf2x16(first.y));
    return signed_bytes(first.x) * unpackHalf2x16(first.z).x;
}

vec4 decode_high(uint type, uvec4 first, uvec4 second) {
    if (type == F32) return uintBitsToFloat(second);
    if (type == F16) return vec4(unpackHalf2x16(first.z), unpackHalf2x16(first.w));
    return signed_bytes(first.y) * unpackHalf2x16(first.z).x;
}

// ----- writing -----

layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer CacheWord { uint word; };

void store_row_word(uint type, uvec2 region, uint row, uint word, uint bits) {
    CacheWord(address_add(region, row * row_bytes(type) + word * 4u)).word = bits;
}

void store_scale_word(uvec2 region, uint row, uint word, uint bits) {
    CacheWord(address_add(region, scales_at() + (row * SCALE_WORDS + word) * 4u)).word = bits;
}

// The bits of a magnitude, which are in its order, with those of NaN above all.
uint magnitude_bits(float value) { return floatBitsToUint(value) & 0x7FFFFFFFu; }

// The scale of a block, an f16, by the bits of its largest magnitude: a 127th of it. NaN makes all of the block NaN.
uint block_scale(uint largest) {
    const uint INFINITE = 0x7F800000u, HALF_NAN = 0x7E00u;
    if (largest > INFINITE) return HALF_NAN;
    return pack_half2(uintBitsToFloat(min(largest, INFINITE - 1u)) * 0.00787401574803149606, 0.0);
}

// The whole number nearest to value / scale, at a tie the one farther from zero: what a division rounds to here has no say, as
// a product of a quant and a scale is exact, and so is what is left.
uint quant(float value, float scale) {
    if (!(scale > 0.0)) return 0u;
    const float size = min(abs(value), 127.0 * scale);
    const float guess = floor(size * (1.0 / scale) + 0.5);
    const float rest = size - guess * scale;
    const float nearest = guess + (2.0 * rest >= scale ? 1.0 : 2.0 * rest < -scale ? -1.0 : 0.0);
    return uint(int(value < 0.0 ? -nearest : nearest)) & 0xFFu;
}

// A word of a row: its first word_dims(type) values. `scale` is an f16, for q8_0.
uint encode(uint type, vec4 values, uint scale) {
    if (type == F32) return floatBitsToUint(values.x);
    if (type == F16) return pack_half2(values.x, values.y);
    const float factor = unpackHalf2x16(scale).x;
    return quant(values.x, factor) | quant(values.y, factor) << 8u | quant(values.z, factor) << 16u |
           quant(values.w, factor) << 24u;
}
