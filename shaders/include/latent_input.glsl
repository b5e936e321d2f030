// The absorbed and rotated query heads, and this token's normed and rotated row, for latent_attention.comp.
// Needs: attention_state.glsl, attention_rope.glsl, the bindings and push constants of latent_attention.comp.
float compressed_factor; // 1 / rms of the compressed part of this token's row, by which that is yet to be multiplied

// One dim of a head's query.
float query_dim(uint head, uint d, uint position) {
    if (d < KV_RANK) return absorbed[ROW * absorbed_pitch + head * KV_RANK + d];
    const uint row = ROW * q_pitch + q_offset + head * (NOPE_DIM + ROPE_DIM) + NOPE_DIM;
    const uint turned_dim = d - KV_RANK;
    return turned(q[row + turned_dim], q[row + rotation_partner(turned_dim)], turned_dim, rotation(turned_dim, position));
}

// Fills `query` by way of the stage; units beyond the row are zeros.
void load_query(uint first_head, uint position) {
    for (uint i = lane; i < WORKGROUP_HEADS * ROW_DIM; i += WORKGROUP_LANES) {
        stage[i] = query_dim(first_head + i / ROW_DIM, i % ROW_DIM, position);
    }
    barrier();
    TRANSFORM_STAGE(WORKGROUP_HEADS, K_HADAMARD)
    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        [[unroll]] for (uint i = 0u; i < LANE_UNITS * 2u; ++i) {
            const uint d = (team_lane + i / 2u * TEAM_LANES) * 8u + i % 2u * 4u;
            const uint at = h * ROW_DIM + d;
            vec4 values = vec4(0.0);
            if (UNITS % TEAM_LANES == 0u || d < ROW_DIM) {
                values = scale * vec4(stage[at], stage[at + 1u], stage[at + 2u], stage[at + 3u]);
            }
            query[h * LANE_UNITS * 2u + i] = values;
        }
    }
    barrier(); // the stage has been read
}

// Stages this token's row. Every invocation must call it, once the queries are loaded.
void stage_row(uint position) {
    const uint first = ROW * kv_pitch + kv_offset;
    float squares = 0.0;
    if (is_active) {
        for (uint d = lane; d < ROW_DIM; d += ACTIVE_LANES) {
            const float value = kv[first + d];
            if (d < KV_RANK) {
                stage[d] = value * load_float(address_add(gain, d * 4u));
                squares += value * value;
            } else {
                const float partner = kv[first + KV_RANK + rotation_partner(d - KV_RANK)];
                stage[d] = turned(value, partner, d - KV_RANK, rotation(d - KV_RANK, position));
            }
        }
        lane_part[part_index(0u)] = squares;
    }
    sum_parts(1u);
    compressed_factor = inverse_rms(workgroup_total(0u), KV_RANK);
    TRANSFORM_STAGE(1u, K_HADAMARD)
}

// One dim of this token's row, as it goes into the cache.
float own_dim(uint cache, uint kv_head, uint d) {
    return stage[d] * (d < KV_RANK ? compressed_factor : 1.0);
}
