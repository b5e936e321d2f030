// Reading and writing rows of the caches of attention.comp and latent_attention.comp: f16 with KV_F16, f32 without.
// Needs: attention_state.glsl, the push constant `context`; half.glsl is included here.
#include "half.glsl"

const uint UNIT_BYTES = UNIT_RAW * 16u;
const uint ROW_BYTES = UNITS * UNIT_BYTES;

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer CacheWords4 { uvec4 words; };

uvec2 unit_address(uvec2 cache, uint kv_head, uint position, uint unit) {
    return address_add(address_add_product(cache, kv_head * context + position, ROW_BYTES), unit * UNIT_BYTES);
}

#ifdef KV_F16
vec4 decode_low(const uvec4 raw[STEP_RAW], uint at) { return vec4(unpackHalf2x16(raw[at].x), unpackHalf2x16(raw[at].y)); }
vec4 decode_high(const uvec4 raw[STEP_RAW], uint at) { return vec4(unpackHalf2x16(raw[at].z), unpackHalf2x16(raw[at].w)); }
uvec4 encode(const float values[8], uint word) {
    return uvec4(pack_half2(values[0], values[1]), pack_half2(values[2], values[3]),
                 pack_half2(values[4], values[5]), pack_half2(values[6], values[7]));
}
#else
vec4 decode_low(const uvec4 raw[STEP_RAW], uint at) { return uintBitsToFloat(raw[at]); }
vec4 decode_high(const uvec4 raw[STEP_RAW], uint at) { return uintBitsToFloat(raw[at + 1u]); }
uvec4 encode(const float values[8], uint word) {
    return word == 0u ? floatBitsToUint(vec4(values[0], values[1], values[2], values[3]))
                      : floatBitsToUint(vec4(values[4], values[5], values[6], values[7]));
}
#endif

// Loads this lane's units of the step's positions; zeros beyond the end and the row, so that no 0 meets a NaN.
// This token's row `own` comes from shared memory: what was just stored by address is never read back.
#define LOAD_STEP(cache, own, kv_head, first, end, position, raw) \
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) { \
        [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) { \
            const uint unit = team_lane + j * TEAM_LANES; \
            const uvec2 address = unit_address(cache, kv_head, first + i, unit); \
            [[unroll]] for (uint word = 0u; word < UNIT_RAW; ++word) { \
                uvec4 loaded = uvec4(0u); \
                if (first + i < end && (UNITS % TEAM_LANES == 0u || unit < UNITS)) { \
                    if (first + i == position) loaded = own[unit * UNIT_RAW + word]; \
                    else loaded = load_words4(address_add(address, word * 16u)); \
                } \
                raw[(i * LANE_UNITS + j) * UNIT_RAW + word] = loaded; \
            } \
        } \
    }
