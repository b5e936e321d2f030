// Norm and RoPE of the query heads and of this token's k, and the appended cache rows, for attention.comp.
// Needs: attention_cache.glsl, attention_rope.glsl, the bindings and push constants of attention.comp.
const uint Q_WIDTH = N_HEADS * HEAD_DIM;
const uint KV_WIDTH = N_KV_HEADS * HEAD_DIM;
const uint NORM_PER_HEAD = 1u, NORM_FULL_WIDTH = 2u;

// One dim of a raw row times its gain. `gain_row` is the row's first gain (full width) or 0 (per head).
float gained(uint row, uint d, uvec2 gain, uint gain_row) {
    const float value = qkv[row + d];
    return NORM_MODE == 0u ? value : value * load_float(address_add(gain, (gain_row + d) * 4u));
}

// One dim after gain and rotation. The norm's scalar commutes with the rotation and is applied later.
float rotated(uint row, uint d, uvec2 gain, uint gain_row, uint position) {
    const float value = gained(row, d, gain, gain_row);
    if (d >= ROTARY_DIM) return value;
    return turned(value, gained(row, rotation_partner(d), gain, gain_row), d, position);
}

// Writes one rotated row to the stage; returns this lane's share of its sum of squares.
float stage_row(uint stage_index, uint row, uvec2 gain, uint gain_row, uint position) {
    float squares = 0.0;
    if (!is_active) return squares;
    for (uint d = lane; d < HEAD_DIM; d += ACTIVE_LANES) {
        stage[stage_index * HEAD_DIM + d] = rotated(row, d, gain, gain_row, position);
        squares += qkv[row + d] * qkv[row + d];
    }
    return squares;
}

// This lane's share of the sum of squares of qkv[first ... first + width).
float span_squares(uint first, uint width) {
    float squares = 0.0;
    if (!is_active) return squares;
    for (uint i = first + lane; i < first + width; i += ACTIVE_LANES) squares += qkv[i] * qkv[i];
    return squares;
}

shared uvec4 own_key[UNITS * UNIT_RAW]; // this token's k and v, exactly as the caches hold them
shared uvec4 own_value[UNITS * UNIT_RAW];
float key_inverse_rms; // of this token's k row, which lies in stage row WORKGROUP_HEADS

// Stages all query heads of this workgroup and k, and sums their squares: totals WORKGROUP_HEADS + 1 values.
void stage_rows(uint first_head, uint kv_head, uint position) {
    const bool full_width = NORM_MODE == NORM_FULL_WIDTH;
    for (uint i = 0u; i <= WORKGROUP_HEADS; ++i) {
        const bool is_key = i == WORKGROUP_HEADS;
        const uint row = is_key ? kv_head * HEAD_DIM : (first_head + i) * HEAD_DIM;
        float squares = stage_row(i, is_key ? Q_WIDTH + row : row, is_key ? k_gain : q_gain, full_width ? row : 0u, position);
        if (full_width && i == 0u) squares = span_squares(0u, Q_WIDTH);
        if (full_width && is_key) squares = span_squares(Q_WIDTH, KV_WIDTH);
        lane_part[part_index(i)] = squares;
    }
    sum_parts(WORKGROUP_HEADS + 1u);
}

// Fills `query` and stages this token's k.
void load_query(uint first_head, uint kv_head, uint position) {
    stage_rows(first_head, kv_head, position);
    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        float factor = scale;
        if (NORM_MODE == NORM_PER_HEAD) factor *= inverse_rms(workgroup_total(h), HEAD_DIM);
        if (NORM_MODE == NORM_FULL_WIDTH) factor *= inverse_rms(workgroup_total(0u), Q_WIDTH);
        [[unroll]] for (uint i = 0u; i < LANE_UNITS * 2u; ++i) {
            const uint at = h * HEAD_DIM + (team_lane + i / 2u * TEAM_LANES) * 8u + i % 2u * 4u;
            query[h * LANE_UNITS * 2u + i] = factor * vec4(stage[at], stage[at + 1u], stage[at + 2u], stage[at + 3u]);
        }
    }
    key_inverse_rms = 1.0;
    const float key_squares = workgroup_total(WORKGROUP_HEADS);
    if (NORM_MODE == NORM_PER_HEAD) key_inverse_rms = inverse_rms(key_squares, HEAD_DIM);
    if (NORM_MODE == NORM_FULL_WIDTH) key_inverse_rms = inverse_rms(key_squares, KV_WIDTH);
    barrier(); // the totals have been read
}

// Keeps this token's k and v in shared memory for this workgroup and, if `writes`, appends them to the caches.
void append_position(uint kv_head, uint position, bool writes) {
    const uint v_row = Q_WIDTH + KV_WIDTH + kv_head * HEAD_DIM;
    for (uint unit = lane; unit < UNITS; unit += WORKGROUP_LANES) {
        float key[8], value[8];
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            key[i] = stage[WORKGROUP_HEADS * HEAD_DIM + unit * 8u + i] * key_inverse_rms;
            value[i] = qkv[v_row + unit * 8u + i];
        }
        [[unroll]] for (uint word = 0u; word < UNIT_RAW; ++word) {
            own_key[unit * UNIT_RAW + word] = encode(key, word);
            own_value[unit * UNIT_RAW + word] = encode(value, word);
            if (writes) {
                CacheWords4(address_add(unit_address(k_cache, kv_head, position, unit), word * 16u)).words = encode(key, word);
                CacheWords4(address_add(unit_address(v_cache, kv_head, position, unit), word * 16u)).words = encode(value, word);
            }
        }
    }
    barrier();
}
