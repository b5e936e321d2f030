// What a region of a KV cache holds, by the cache's type: [N_KV_HEADS][PLACES] rows of CACHED_DIM dims. Each position has a row,
// unless layers that see a window alone have a ring of RING places, a power of two: there it has that of its number modulo RING.
//   f16, f32  the rows, one behind the other.
//   q8_0, q5_1, q4_0
//             blocks of 32 dims with one scale, as ggml's; the last block of a row may be shorter. First the quants of all rows;
//             then what their blocks share, of each row whole words. A quant has 8 bits with a sign; or its lowest 4 bits: of 8
//             dims in a word, whose byte i has those of dim i and, above them, of dim 4 + i.
//   q8_0      a block's scale, f16. dim = scale * quant.
//   q4_0      a block's scale, f16. dim = scale * (quant - 8).
//   q5_1      of each block two words: scale and minimum, f16; and the fifth bits of its quants, that of dim 8u + 4h + i in bit
//             2u + h of byte i. dim = scale * quant + minimum.
// A unit is 8 dims, which a lane loads at once. The host's side: vkmoe/kv_types.py.
// A product of a scale and a quant is exact, so that no compiler's choice of fused multiply-adds has a say in what is read.
// Needs: address.glsl, CACHED_DIM (whole units), N_KV_HEADS, the constants RING, K_TYPE and V_TYPE, the push constants `context` and
// `n_regions`.
#include "half.glsl"

const uint F16 = 0u, F32 = 1u, Q8_0 = 2u, Q5_1 = 3u, Q4_0 = 4u; // as vkmoe/kv_types.py numbers them
const uint UNITS = CACHED_DIM / 8u;
const uint BLOCK_UNITS = 4u, BLOCK_DIMS = 32u;
const uint N_BLOCKS = (CACHED_DIM + BLOCK_DIMS - 1u) / BLOCK_DIMS;
// 16-byte words that a unit takes once it is loaded, in either cache. Where there are scales: its quants in x (q8_0: in xy), its
// fifth bits in y from bit 0 of each byte on, what its block shares in z.
const uint UNIT_RAW = K_TYPE == F32 || V_TYPE == F32 ? 2u : 1u;

bool has_scales(uint type) { return type >= Q8_0; }
uint raw_words(uint type) { return type == F32 ? 2u : 1u; } // those of them that a type fills
uint word_dims(uint type) { return type == F32 ? 1u : type == F16 ? 2u : type == Q8_0 ? 4u : 8u; }
uint row_words(uint type) { return CACHED_DIM / word_dims(type); } // without scales
uint row_bytes(uint type) { return row_words(type) * 4u; }
uint unit_bytes(uint type) { return 32u / word_dims(type); }
uint scale_words(uint type) { return type == Q5_1 ? 2u * N_BLOCKS : (N_BLOCKS + 1u) / 2u; } // of a row

#define PLACES (RING == 0u ? context : RING)

uint scales_at(uint type) { return N_KV_HEADS * PLACES * row_bytes(type); } // bytes from a region's beginning

uint region_bytes(uint type) {
    if (!has_scales(type)) return N_KV_HEADS * PLACES * row_bytes(type);
    return (scales_at(type) + N_KV_HEADS * PLACES * scale_words(type) * 4u + 15u) / 16u * 16u;
}

// Of a sequence's region in a cache; the regions of a cache may be more than 4 GiB together, one of them is less.
uvec2 region_address(uint type, uvec2 cache, uint sequence) {
    return address_add_product(cache, min(sequence, n_regions - 1u), region_bytes(type));
}

// ----- reading; `row` counts from the region's first -----

uint cached_row(uint kv_head, uint position) { return kv_head * PLACES + (RING == 0u ? position : position & (RING - 1u)); }

// One of the words that the blocks of a row share.
uint load_scale_word(uint type, uvec2 region, uint row, uint word) {
    return load_word(address_add(region, scales_at(type) + (row * scale_words(type) + word) * 4u));
}

// One of a unit's 16-byte words.
uvec4 load_raw(uint type, uvec2 region, uint row, uint unit, uint word) {
    const uint begin = row * row_bytes(type) + unit * unit_bytes(type) + word * 16u;
    if (!has_scales(type)) return load_words4(address_add(region, begin));
    const uint block = unit / BLOCK_UNITS;
    if (type == Q5_1) {
        const uint shared_numbers = load_scale_word(type, region, row, 2u * block);
        const uint fifth_bits = load_scale_word(type, region, row, 2u * block + 1u);
        return uvec4(load_word(address_add(region, begin)), fifth_bits >> unit % BLOCK_UNITS * 2u, shared_numbers, 0u);
    }
    const uint pair = load_scale_word(type, region, row, block / 2u);
    const uint scale = pair >> block % 2u * 16u;
    if (type == Q4_0) return uvec4(load_word(address_add(region, begin)), 0u, scale, 0u);
    return uvec4(load_words2(address_add(region, begin)), scale, 0u);
}

vec4 signed_bytes(uint word) {
    const int value = int(word);
    return vec4(float(bitfieldExtract(value, 0, 8)), float(bitfieldExtract(value, 8, 8)),
                float(bitfieldExtract(value, 16, 8)), float(bitfieldExtract(value, 24, 8)));
}

vec4 unsigned_bytes(uint word) {
    return vec4(float(word & 0xFFu), float(word >> 8u & 0xFFu), float(word >> 16u & 0xFFu), float(word >> 24u));
}

// Dims of quants, one in each byte of a word, by what their block shares.
vec4 scaled(uint type, uint quants, uint shared_numbers) {
    const vec2 numbers = unpackHalf2x16(shared_numbers);
    if (type == Q8_0) return signed_bytes(quants) * numbers.x;
    if (type == Q4_0) return (unsigned_bytes(quants) - 8.0) * numbers.x;
    return unsigned_bytes(quants) * numbers.x + numbers.y;
}

// The first and last four dims of a unit; `second` is its second 16-byte word, of f32.
vec4 decode_low(uint type, uvec4 first) {
    if (type == F32) return uintBitsToFloat(first);
    if (type == F16) return vec4(unpackHalf2x16(first.x), unpackHalf2x16(first.y));
    if (type == Q8_0) return scaled(type, first.x, first.z);
    return scaled(type, first.x & 0x0F0F0F0Fu | (type == Q5_1 ? first.y << 4u & 0x10101010u : 0u), first.z);
}

vec4 decode_high(uint type, uvec4 first, uvec4 second) {
    if (type == F32) return uintBitsToFloat(second);
    if (type == F16) return vec4(unpackHalf2x16(first.z), unpackHalf2x16(first.w));
    if (type == Q8_0) return scaled(type, first.y, first.z);
    return scaled(type, first.x >> 4u & 0x0F0F0F0Fu | (type == Q5_1 ? first.y << 3u & 0x10101010u : 0u), first.z);
}

// ----- writing -----

layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer CacheWord { uint word; };

void store_row_word(uint type, uvec2 region, uint row, uint word, uint bits) {
    CacheWord(address_add(region, row * row_bytes(type) + word * 4u)).word = bits;
}

void store_scale_word(uint type, uvec2 region, uint row, uint word, uint bits) {
    CacheWord(address_add(region, scales_at(type) + (row * scale_words(type) + word) * 4u)).word = bits;
}

// The bits of a magnitude, which are in its order, with those of NaN above all.
uint magnitude_bits(float value) { return floatBitsToUint(value) & 0x7FFFFFFFu; }

// Of a block's dims: the bits of the largest magnitude; and the extremes, which mean something where no dim is NaN.
struct Extremes {
    uint largest;
    float lowest;
    float highest;
};
const float LARGEST_FLOAT = 3.4028234663852886e38;
const Extremes NO_DIMS = Extremes(0u, LARGEST_FLOAT, -LARGEST_FLOAT);

Extremes joined(Extremes before, float value) {
    const uint largest = max(before.largest, magnitude_bits(value));
    return Extremes(largest, min(before.lowest, value), max(before.highest, value));
}

// What the dims of a block share, f16: the scale, which is a 127th of the largest magnitude (q8_0), an eighth of the number
// that has it, negated (q4_0), or a 31st of the range, with the minimum above it (q5_1). NaN makes all of the block NaN.
uint block_numbers(uint type, Extremes of) {
    const uint INFINITE = 0x7F800000u, HALF_NAN = 0x7E00u;
    if (of.largest > INFINITE) return HALF_NAN;
    if (type == Q8_0) return pack_half2(uintBitsToFloat(min(of.largest, INFINITE - 1u)) * 0.00787401574803149606, 0.0);
    if (type == Q4_0) {
        const float extreme = -of.lowest >= of.highest ? of.lowest : of.highest;
        return pack_half2(clamp(extreme, -LARGEST_FLOAT, LARGEST_FLOAT) * -0.125, 0.0);
    }
    const float lowest = clamp(of.lowest, -HALF_MAX, HALF_MAX), highest = clamp(of.highest, -HALF_MAX, HALF_MAX);
    precise const float range = highest - lowest;
    return pack_half2(range * 0.0322580645161290323, lowest);
}

// The whole number nearest to value / scale, at most `most`; at a tie the larger one: what a division rounds to here has no say,
// as a product of a quant and a scale is exact, and so is what is left. Must hold: neither is negative.
float quant_size(float value, float scale, float most) {
    if (!(scale > 0.0)) return 0.0;
    const float size = min(value, most * scale);
    const float guess = floor(size * (1.0 / scale) + 0.5);
    precise const float rest = size - guess * scale;
    return guess + (2.0 * rest >= scale ? 1.0 : 2.0 * rest < -scale ? -1.0 : 0.0);
}

// The bits of a quant, by what its block shares; the tie of q8_0 and q4_0 goes to the one farther from zero.
uint quant(uint type, float value, uint shared_numbers) {
    const vec2 numbers = unpackHalf2x16(shared_numbers);
    if (type == Q5_1) {
        precise const float above = clamp(value, -HALF_MAX, HALF_MAX) - numbers.y;
        return uint(quant_size(max(above, 0.0), numbers.x, 31.0));
    }
    const float size = quant_size(abs(value), abs(numbers.x), type == Q8_0 ? 127.0 : 8.0);
    const float whole = value < 0.0 != numbers.x < 0.0 ? -size : size;
    return type == Q8_0 ? uint(int(whole)) & 0xFFu : uint(min(whole, 7.0) + 8.0);
}

// A word of a row, of its first word_dims(type) values, and beside it the fifth bits of its quants, those of q5_1, as a loaded
// unit has them. `shared_numbers` are those of the block, where it has any.
uvec2 encode(uint type, vec4 low, vec4 high, uint shared_numbers) {
    if (type == F32) return uvec2(floatBitsToUint(low.x), 0u);
    if (type == F16) return uvec2(pack_half2(low.x, low.y), 0u);
    uvec2 word = uvec2(0u);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        const uint first = quant(type, low[i], shared_numbers);
        if (type == Q8_0) {
            word.x |= first << 8u * i;
        } else {
            const uint second = quant(type, high[i], shared_numbers);
            word.x |= ((first & 15u) | (second & 15u) << 4u) << 8u * i;
            word.y |= (first >> 4u | second >> 4u << 1u) << 8u * i;
        }
    }
    return word;
}
