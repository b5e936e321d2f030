// Norm and RoPE of the query heads and of this token's k, and its v, for attention.comp.
// Needs: attention_state.glsl, attention_rope.glsl, the bindings and push constants of attention.comp.
const uint Q_WIDTH = N_HEADS * HEAD_DIM;
const uint KV_WIDTH = N_KV_HEADS * HEAD_DIM;
const uint NORM_PER_HEAD = 1u, NORM_FULL_WIDTH = 2u, NORM_PER_HEAD_TURNED = 3u; // the last has gains behind the rotation
const bool OF_HEADS = NORM_MODE == NORM_PER_HEAD || NORM_MODE == NORM_PER_HEAD_TURNED;

// The first word of a staged row in this row of the batch: query heads, then k.
uint input_row(uint index, uint first_head, uint kv_head) {
    return index < WORKGROUP_HEADS ? (first_head + index) * HEAD_DIM : Q_WIDTH + kv_head * HEAD_DIM;
}

// The gain of dim `d` of a staged row.
float input_gain(uint index, uint row, uint d) {
    if (NORM_MODE == 0u) return 1.0;
    const bool is_key = index == WORKGROUP_HEADS;
    if (NORM_MODE == NORM_FULL_WIDTH) d += is_key ? row - Q_WIDTH : row;
    return load_float(address_add(is_key ? k_gain : q_gain, d * 4u));
}

// This lane's share of the sum of squares of qkv[first ... first + width), in pieces whose loads do not wait for each other.
float span_squares(uint first, uint width) {
    const uint PIECE = 8u;
    float squares = 0.0;
    for (uint begin = lane; begin < width; begin += PIECE * ACTIVE_LANES) {
        [[unroll]] for (uint i = 0u; i < PIECE; ++i) {
            const uint at = begin + i * ACTIVE_LANES;
            const float value = at < width ? qkv[first_qkv + first + min(at, width - 1u)] : 0.0;
            squares += value * value;
        }
    }
    return squares;
}

float key_inverse_rms; // of this token's k row, which lies in stage row WORKGROUP_HEADS
float value_inverse_rms = 1.0; // of its v, if VALUE_NORM

// Stages all query heads of this workgroup and k after gain and rotation, and sums the squares of the raw rows: totals
// INPUT_ROWS values. The norm's scalar commutes with the rotation and is applied later. A dim of all rows is loaded at once.
void stage_rows(uint first_head, uint kv_head, uint position) {
    float squares[INPUT_ROWS];
    [[unroll]] for (uint i = 0u; i < INPUT_ROWS; ++i) squares[i] = 0.0;
    for (uint d = lane; d < (is_active ? HEAD_DIM : 0u); d += ACTIVE_LANES) {
        const bool is_turned = ROTARY_DIM == HEAD_DIM || d < ROTARY_DIM;
        const uint rotary = is_turned ? d : 0u, partner = rotation_partner(rotary);
        const vec2 cosine_sine = rotation(rotary, position);
        [[unroll]] for (uint i = 0u; i < INPUT_ROWS; ++i) {
            const uint row = input_row(i, first_head, kv_head);
            const float raw = qkv[first_qkv + row + d];
            const bool gains_first = NORM_MODE != NORM_PER_HEAD_TURNED;
            const float value = gains_first ? raw * input_gain(i, row, d) : raw;
            const float partner_raw = qkv[first_qkv + row + partner];
            const float other = gains_first ? partner_raw * input_gain(i, row, partner) : partner_raw;
            const float found = is_turned ? turned(value, other, rotary, cosine_sine) : value;
            stage[i * HEAD_DIM + d] = gains_first ? found : found * input_gain(i, row, d);
            squares[i] += raw * raw;
        }
    }
    if (NORM_MODE == NORM_FULL_WIDTH && is_active) {
        squares[0] = span_squares(0u, Q_WIDTH);
        squares[WORKGROUP_HEADS] = span_squares(Q_WIDTH, KV_WIDTH);
    }
    [[unroll]] for (uint i = 0u; i < INPUT_ROWS; ++i) lane_part[part_index(i)] = squares[i];
    sum_parts(INPUT_ROWS);
}

// Fills `query` and stages this token's k.
void load_query(uint first_head, uint kv_head, uint position) {
    stage_rows(first_head, kv_head, position);
    TRANSFORM_STAGE(INPUT_ROWS, K_HADAMARD)
    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        float factor = scale;
        if (OF_HEADS) factor *= inverse_rms(workgroup_total(h), HEAD_DIM);
        if (NORM_MODE == NORM_FULL_WIDTH) factor *= inverse_rms(workgroup_total(0u), Q_WIDTH);
        [[unroll]] for (uint i = 0u; i < LANE_UNITS * 2u; ++i) {
            const uint at = h * HEAD_DIM + (team_lane + i / 2u * TEAM_LANES) * 8u + i % 2u * 4u;
            query[h * LANE_UNITS * 2u + i] = factor * vec4(stage[at], stage[at + 1u], stage[at + 2u], stage[at + 3u]);
        }
    }
    key_inverse_rms = 1.0;
    const float key_squares = workgroup_total(WORKGROUP_HEADS);
    if (OF_HEADS) key_inverse_rms = inverse_rms(key_squares, HEAD_DIM);
    if (NORM_MODE == NORM_FULL_WIDTH) key_inverse_rms = inverse_rms(key_squares, KV_WIDTH);
    barrier(); // the totals have been read
}

// The first word of a kv head's v in this row of the batch.
uint value_row(uint kv_head) { return Q_WIDTH + KV_WIDTH + kv_head * HEAD_DIM; }

// One dim of this token's v, after its norm if it has one.
float value_dim(uint kv_head, uint d) {
    const float raw = qkv[first_qkv + value_row(kv_head) + d];
    return VALUE_NORM != 0u ? raw * value_inverse_rms : raw;
}

// One dim of this token's k or v, as it goes into the cache. Where that has scales, v is staged in place of the first query, as it
// is read twice.
float own_dim(uint cache, uint kv_head, uint d) {
    const float key = stage[WORKGROUP_HEADS * HEAD_DIM + d] * key_inverse_rms;
    if (cache == KEYS) return key;
    return has_scales(V_TYPE) ? stage[d] : value_dim(kv_head, d);
}

// Norms this token's v, and stages it where its cache has scales. Every invocation must call it, once the queries are loaded.
void stage_value(uint kv_head) {
    if (VALUE_NORM != 0u) {
        lane_part[part_index(0u)] = is_active ? span_squares(value_row(kv_head), HEAD_DIM) : 0.0;
        sum_parts(1u);
        value_inverse_rms = inverse_rms(workgroup_total(0u), HEAD_DIM);
        barrier(); // the total has been read
    }
    if (!has_scales(V_TYPE)) return;
    for (uint d = lane; d < HEAD_DIM; d += WORKGROUP_LANES) stage[d] = value_dim(kv_head, d);
    barrier();
    TRANSFORM_STAGE(1u, V_HADAMARD)
}
