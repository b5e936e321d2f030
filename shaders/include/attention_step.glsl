// One step of the online softmax (Milakov & Gimelshein 2018): scores, weights, weighted sums of rows.
// Needs: attention_cache.glsl.

// Scores of this step's positions: dot products over the team's units, summed over the team.
void step_scores(const uvec4 keys[STEP_RAW], inout float values[STEP_VALUES]) {
    [[unroll]] for (uint i = 0u; i < STEP_VALUES; ++i) values[i] = 0.0;
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) {
        [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) {
            const uint raw = (i * LANE_UNITS + j) * UNIT_RAW;
            const vec4 low = decode_low(K_TYPE, keys[raw]);
            const vec4 high = decode_high(K_TYPE, keys[raw], keys[raw + UNIT_RAW - 1u]);
            [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
                const uint at = (h * LANE_UNITS + j) * 2u;
                values[i * WORKGROUP_HEADS + h] += dot(query[at], low) + dot(query[at + 1u], high);
            }
        }
    }
    team_sums(values);
}

// Turns scores into weights, and moves each head's running maximum and sum on.
void step_softmax(uint first, uint end, inout float values[STEP_VALUES]) {
    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        float top = running_max[h];
        [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) {
            if (first + i < end) top = max(top, values[i * WORKGROUP_HEADS + h]);
        }
        const float fade = exp(running_max[h] - top);
        float sum = running_sum[h] * fade;
        [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) {
            const uint at = i * WORKGROUP_HEADS + h;
            values[at] = first + i < end ? exp(values[at] - top) : 0.0;
            sum += values[at];
        }
        running_max[h] = top;
        running_sum[h] = sum;
        [[unroll]] for (uint i = 0u; i < VALUE_LANE_UNITS * 2u; ++i) running_out[h * VALUE_LANE_UNITS * 2u + i] *= fade;
    }
}

// Adds the step's rows, times their weights.
void step_values(const uvec4 rows[STEP_RAW], const float weights[STEP_VALUES]) {
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) {
        [[unroll]] for (uint j = 0u; j < VALUE_LANE_UNITS; ++j) {
            const uint raw = (i * LANE_UNITS + j) * UNIT_RAW;
            const vec4 low = decode_low(V_TYPE, rows[raw]);
            const vec4 high = decode_high(V_TYPE, rows[raw], rows[raw + UNIT_RAW - 1u]);
            [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
                const uint at = (h * VALUE_LANE_UNITS + j) * 2u;
                running_out[at] += weights[i * WORKGROUP_HEADS + h] * low;
                running_out[at + 1u] += weights[i * WORKGROUP_HEADS + h] * high;
            }
        }
    }
}
