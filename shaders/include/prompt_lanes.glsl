// The walk of prompt_attention.comp on CPU drivers, where what a lane loads is what counts, and shared memory costs as much: the
// lanes of a workgroup, which is one subgroup, share the dims of a row, and have these of COLUMNS queries in registers. They
// take STEP positions at a time; subgroups add. A broken promise (several subgroups) gives NaN.
// Needs: prompt_attention.comp, reduce.glsl with ONE_SUBGROUP.
#include "reduce.glsl"

const uint LANES = gl_WorkGroupSize.x;
const uint LANE_UNITS = (UNITS + LANES - 1u) / LANES; // unit of lane: lane + j * LANES
const uint VALUE_LANE_UNITS = (VALUE_UNITS + LANES - 1u) / LANES;
const uint STEP = 2u;
const float LOWEST = -3.0e38;

uint lane;
vec4 query[COLUMNS * LANE_UNITS * 2u];      // [column][lane unit][low, high], scaled
vec4 sums[COLUMNS * VALUE_LANE_UNITS * 2u]; // [column][lane unit of the value][low, high]
float tops[COLUMNS];                        // that the sums are relative to
float totals[COLUMNS];                      // of the weights

void begin_columns() {
    lane = gl_LocalInvocationIndex;
    [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
        tops[c] = LOWEST;
        totals[c] = 0.0;
        [[unroll]] for (uint i = 0u; i < LANE_UNITS * 2u; ++i)
            query[c * LANE_UNITS * 2u + i] = query4(c, (lane + i / 2u * LANES) * 8u + i % 2u * 4u);
    }
    [[unroll]] for (uint i = 0u; i < COLUMNS * VALUE_LANE_UNITS * 2u; ++i) sums[i] = vec4(0.0);
}

// This lane's units of a row; positions that no row sees may never have been written: the nearest that is seen stands in.
void load_row(uint type, uvec2 region, Positions seen, uint position, out RawUnit raw[LANE_UNITS]) {
    [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) {
        const uint unit = min(lane + j * LANES, UNITS - 1u);
        raw[j] = load_unit(type, region, cached_row(kv_head(), clamp(position, seen.first, seen.last)), unit);
    }
}

// The scores of all columns at a position.
void score_row(const RawUnit keys[LANE_UNITS], out float scores[COLUMNS]) {
    vec4 dots[COLUMNS];
    [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) {
        const vec4 low = decode_low(K_TYPE, keys[j]), high = decode_high(K_TYPE, keys[j]);
        [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
            const uint at = (c * LANE_UNITS + j) * 2u;
            precise const vec4 dot4 = j == 0u ? query[at] * low : fma(query[at], low, dots[c]);
            dots[c] = fma(query[at + 1u], high, dot4);
        }
    }
    [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
        precise const float sum = (dots[c].x + dots[c].y) + (dots[c].z + dots[c].w);
        scores[c] = workgroup_sum(sum);
    }
}

// Turns the scores of a step into weights, and makes a column's sums relative to its new maximum.
void weigh_step(Positions seen, uint c, uint step, inout float scores[STEP][COLUMNS]) {
    float top = tops[c];
    [[unroll]] for (uint i = 0u; i < STEP; ++i) top = includes(seen, step + i) ? max(top, scores[i][c]) : top;
    const float fade = fade_of(tops[c], top);
    precise float sum = totals[c] * fade;
    [[unroll]] for (uint i = 0u; i < STEP; ++i) {
        scores[i][c] = includes(seen, step + i) ? exp(scores[i][c] - top) : 0.0;
        sum += scores[i][c];
    }
    tops[c] = top;
    totals[c] = sum;
    [[unroll]] for (uint i = 0u; i < VALUE_LANE_UNITS * 2u; ++i) {
        precise const vec4 faded = sums[c * VALUE_LANE_UNITS * 2u + i] * fade;
        sums[c * VALUE_LANE_UNITS * 2u + i] = faded;
    }
}

// Adds to the columns that see the row.
void add_row(const RawUnit values[LANE_UNITS], const float weights[COLUMNS], const bool sees[COLUMNS]) {
    [[unroll]] for (uint j = 0u; j < VALUE_LANE_UNITS; ++j) {
        const vec4 low = decode_low(V_TYPE, values[j]), high = decode_high(V_TYPE, values[j]);
        [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
            const uint at = (c * VALUE_LANE_UNITS + j) * 2u;
            precise const vec4 more_low = fma(vec4(weights[c]), low, sums[at]);
            precise const vec4 more_high = fma(vec4(weights[c]), high, sums[at + 1u]);
            sums[at] = sees[c] ? more_low : sums[at];
            sums[at + 1u] = sees[c] ? more_high : sums[at + 1u];
        }
    }
}

void walk(Run run) {
    const uvec2 keys = region_address(K_TYPE, k_cache, run.sequence), values = region_address(V_TYPE, v_cache, run.sequence);
    Positions seen[COLUMNS];
    [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) seen[c] = is_inert(c) ? NOTHING : seen_in(run, c);
    for (uint step = run.seen.first / STEP * STEP; step <= run.seen.last; step += STEP) {
        RawUnit rows[STEP][LANE_UNITS];
        float weights[STEP][COLUMNS];
        [[unroll]] for (uint i = 0u; i < STEP; ++i) {
            load_row(K_TYPE, keys, run.seen, step + i, rows[i]);
            score_row(rows[i], weights[i]);
        }
        [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) weigh_step(seen[c], c, step, weights);
        [[unroll]] for (uint i = 0u; i < STEP; ++i) {
            if (!IS_LATENT) load_row(V_TYPE, values, run.seen, step + i, rows[i]);
            bool sees[COLUMNS];
            [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) sees[c] = includes(seen[c], step + i);
            add_row(rows[i], weights[i], sees);
        }
    }
}

void store_columns() {
    [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
        const float factor = closing_factor(c, tops[c], totals[c]);
        [[unroll]] for (uint j = 0u; j < VALUE_LANE_UNITS; ++j) {
            const uint at = (c * VALUE_LANE_UNITS + j) * 2u, unit = lane + j * LANES;
            if (unit < VALUE_UNITS) store_unit(c, unit, sums[at] * factor, sums[at + 1u] * factor);
        }
    }
}
