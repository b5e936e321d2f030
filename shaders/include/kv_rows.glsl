// Rows of KV caches as prompts read and write them.
// Needs: params.glsl, and what kv_types.glsl needs, which is included here.
#include "kv_types.glsl"

uint row_position(uint row) { return min(params.rows[row].position, context - 1u); }

// 8 dims of a row, as they are loaded.
struct RawUnit {
    uvec4 first;
    uvec4 second; // of f32 alone
};

RawUnit load_unit(uint type, uvec2 region, uint row, uint unit) {
    RawUnit raw;
    raw.first = load_raw(type, region, row, unit, 0u);
    if (type == F32) raw.second = load_raw(type, region, row, unit, 1u);
    return raw;
}

vec4 decode_low(uint type, RawUnit raw) { return decode_low(type, raw.first); }
vec4 decode_high(uint type, RawUnit raw) { return decode_high(type, raw.first, raw.second); }
