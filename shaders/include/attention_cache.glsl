// Reading and writing rows of the caches of attention.comp and latent_attention.comp: f16 with KV_F16, f32 without.
// Needs: attention_state.glsl, params.glsl, the push constants `context`, `mode`, `n_regions` and `region_bytes`; cached_word.glsl
// is included here.
#include "cached_word.glsl"

// What a dispatch does, as ops/attention.py numbers it; the caches are the same after each way.
const uint WHOLE = 0u, APPEND = 1u, READ = 2u;

const uint UNIT_BYTES = UNIT_RAW * 16u;
const uint ROW_BYTES = UNITS * UNIT_BYTES, CACHED_WORDS = ROW_BYTES / 4u;

// Where the region of this row's sequence begins.
uvec2 region_start(uvec2 cache) {
    return address_add_product(cache, min(params.rows[ROW].sequence, n_regions - 1u), region_bytes);
}

// Of a 16-byte word; `row` counts rows from the cache's first. A region is smaller than 4 GiB.
uvec2 word_address(uvec2 cache, uint row, uint unit, uint word) {
    return address_add(cache, row * ROW_BYTES + unit * UNIT_BYTES + word * 16u);
}

// The unit `j` of this lane, or the row's last.
uint lane_unit(uint j) {
    const uint unit = team_lane + j * TEAM_LANES;
    return UNITS % TEAM_LANES == 0u ? unit : min(unit, UNITS - 1u);
}

#ifdef KV_F16
vec4 decode_low(const uvec4 raw[STEP_RAW], uint at) { return vec4(unpackHalf2x16(raw[at].x), unpackHalf2x16(raw[at].y)); }
vec4 decode_high(const uvec4 raw[STEP_RAW], uint at) { return vec4(unpackHalf2x16(raw[at].z), unpackHalf2x16(raw[at].w)); }
#else
vec4 decode_low(const uvec4 raw[STEP_RAW], uint at) { return uintBitsToFloat(raw[at]); }
vec4 decode_high(const uvec4 raw[STEP_RAW], uint at) { return uintBitsToFloat(raw[at + 1u]); }
#endif

// Whether this workgroup makes the row of its own position, and then takes it from shared memory.
bool appends(uint end, uint position) { return mode == APPEND || (mode == WHOLE && end == position + 1u); }

// The positions of a split whose rows were there before this dispatch: its own row is being written, maybe by another workgroup.
// The first token has no other row; what it reads there is not used.
uint filled_end(uint end, uint position) { return mode == READ ? end : min(end, max(position, 1u)); }

// Loads this lane's units of the step's positions. No branch keeps a load waiting: beyond the end the last position is read
// again, and beyond the row its last unit; weights and queries are zeros there. TAKE_OWN puts this token's row in its place.
#define LOAD_STEP(cache, kv_head, first, end, raw) \
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) { \
        const uint row = kv_head * context + min(first + i, end - 1u); \
        [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) { \
            [[unroll]] for (uint word = 0u; word < UNIT_RAW; ++word) { \
                raw[(i * LANE_UNITS + j) * UNIT_RAW + word] = load_words4(word_address(cache, row, lane_unit(j), word)); \
            } \
        } \
    }

// This token's row comes from shared memory: what was just stored by address is never read back.
#define TAKE_OWN(own, first, end, position, raw) \
    if (mode == WHOLE && end > position) { \
        [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) { \
            if (first + i >= position) { \
                [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) { \
                    [[unroll]] for (uint word = 0u; word < UNIT_RAW; ++word) { \
                        raw[(i * LANE_UNITS + j) * UNIT_RAW + word] = own[lane_unit(j) * UNIT_RAW + word]; \
                    } \
                } \
            } \
        } \
    }
