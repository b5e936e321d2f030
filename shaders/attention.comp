// Computes  out_h = sum over t of softmax_t(scale * q_h . k_t) * v_t for one token, after norm and RoPE of q and k: per head
//           and split the unnormalised sum, the running maximum and the running sum of weights; attention_combine joins them.
// Inputs    qkv f32 [N_HEADS*HEAD_DIM | N_KV_HEADS*HEAD_DIM | the same] raw; by address the K and V caches [N_KV_HEADS]
//           [context][HEAD_DIM] (f16 or f32), norm gains, and the RoPE table (cos, sin) [context][ROTARY_DIM/2]. Output:
//           partials [N_HEADS][N_SPLITS][HEAD_DIM + 2]. The split that owns the position appends k and v to the caches.
// Who       a team of TEAM_LANES lanes reads one position, 8 dims per lane and unit, for WORKGROUP_HEADS query heads at once,
//           so K and V are read once; teams take STEP_POSITIONS positions per step, each with its own online softmax.
// Assumes   TEAM_LANES divides HEAD_DIM/8, WORKGROUP_HEADS divides N_HEADS/N_KV_HEADS; rows below the position are filled.
// Dispatch  (N_HEADS / WORKGROUP_HEADS, N_SPLITS, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "address.glsl"
#define PARAMS_BINDING 1
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint N_HEADS = 32u;
layout(constant_id = 3) const uint N_KV_HEADS = 4u;
layout(constant_id = 4) const uint ROTARY_DIM = 128u;
layout(constant_id = 5) const uint ROPE_STYLE = 0u; // 0 = halves (neox), 1 = adjacent pairs
layout(constant_id = 6) const uint NORM_MODE = 1u;  // 0 = none, 1 = per head, 2 = full width
layout(constant_id = 7) const uint N_SPLITS = 1u;
layout(constant_id = 8) const uint TEAM_LANES = 8u;
layout(constant_id = 9) const uint STEP_POSITIONS = 4u;
layout(constant_id = 10) const uint WORKGROUP_HEADS = 8u;

layout(set = 0, binding = 0, std430) readonly buffer Qkv { float qkv[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Partials { float partials[]; };
layout(push_constant, std430) uniform Push {
    uvec2 k_cache;
    uvec2 v_cache;
    uvec2 q_gain;
    uvec2 k_gain;
    uvec2 rope_table;
    uint context;
    float eps;
    float scale;
};

#include "attention_split.glsl"
#include "attention_state.glsl"
#include "attention_input.glsl"
#include "attention_cache.glsl"

// Scores of this step's positions: dot products over the team's units, summed over the team.
void step_scores(const uvec4 keys[STEP_RAW], inout float values[STEP_VALUES]) {
    [[unroll]] for (uint i = 0u; i < STEP_VALUES; ++i) values[i] = 0.0;
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) {
        [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) {
            const uint raw = (i * LANE_UNITS + j) * UNIT_RAW;
            const vec4 low = decode_low(keys, raw);
            const vec4 high = decode_high(keys, raw);
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
        [[unroll]] for (uint i = 0u; i < LANE_UNITS * 2u; ++i) running_out[h * LANE_UNITS * 2u + i] *= fade;
    }
}

void step_values(const uvec4 rows[STEP_RAW], const float weights[STEP_VALUES]) {
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) {
        [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) {
            const uint raw = (i * LANE_UNITS + j) * UNIT_RAW;
            const vec4 low = decode_low(rows, raw);
            const vec4 high = decode_high(rows, raw);
            [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
                const uint at = (h * LANE_UNITS + j) * 2u;
                running_out[at] += weights[i * WORKGROUP_HEADS + h] * low;
                running_out[at + 1u] += weights[i * WORKGROUP_HEADS + h] * high;
            }
        }
    }
}

// Writes one lane's share of a head: straight to the partials if there is one team, else to the team's row of the stage.
void store_out(uint h, float fade, uint row) {
    [[unroll]] for (uint i = 0u; i < LANE_UNITS * 2u; ++i) {
        const uint d = (team_lane + i / 2u * TEAM_LANES) * 8u + i % 2u * 4u;
        const vec4 faded = running_out[h * LANE_UNITS * 2u + i] * fade;
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
            if (N_TEAMS == 1u) partials[row + d + c] = faded[c];
            else stage[team * HEAD_DIM + d + c] = faded[c];
        }
    }
}

// Sums the stage's rows in team order into one head's partials.
void join_teams(uint row) {
    barrier();
    [[unroll]] for (uint i = 0u; i < (HEAD_DIM + WORKGROUP_LANES - 1u) / WORKGROUP_LANES; ++i) {
        const uint d = i * WORKGROUP_LANES + lane;
        if (d < HEAD_DIM) {
            float sum = 0.0;
            [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) sum += stage[t * HEAD_DIM + d];
            partials[row + d] = sum;
        }
    }
    barrier();
}

// Joins the teams' online softmaxes and writes this split's partials.
void store_partials(uint first_head) {
    barrier(); // the last step's sums have been read
    if (is_active && team_lane == 0u) {
        [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) team_max[h * N_TEAMS + team] = running_max[h];
        [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) team_total[h * N_TEAMS + team] = running_sum[h];
    }
    barrier();
    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        const uint row = ((first_head + h) * N_SPLITS + gl_WorkGroupID.y) * (HEAD_DIM + 2u);
        float top = LOWEST, total = 0.0;
        [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) top = max(top, team_max[h * N_TEAMS + t]);
        [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) {
            total += team_total[h * N_TEAMS + t] * exp(team_max[h * N_TEAMS + t] - top);
        }
        if (is_active) store_out(h, exp(running_max[h] - top), row);
        if (N_TEAMS > 1u) join_teams(row);
        if (lane == 0u) {
            partials[row + HEAD_DIM] = top;
            partials[row + HEAD_DIM + 1u] = total;
        }
    }
}

void main() {
    const uint first_head = gl_WorkGroupID.x * WORKGROUP_HEADS;
    const uint kv_head = first_head / HEADS_PER_KV;
    const uint position = current_position(context);
    const uint length = split_positions(position);
    const uint start = gl_WorkGroupID.y * length;
    if (start > position) return; // an unused split: attention_combine skips it by the same formula
    const uint end = min(start + length, position + 1u);

    find_team();
    load_query(first_head, kv_head, position);
    if (end == position + 1u) append_position(kv_head, position, first_head % HEADS_PER_KV == 0u);

    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        running_max[h] = LOWEST;
        running_sum[h] = 0.0;
    }
    [[unroll]] for (uint i = 0u; i < QUERY_VECTORS; ++i) running_out[i] = vec4(0.0);
    for (uint step_start = start; step_start < end; step_start += N_TEAMS * STEP_POSITIONS) {
        const uint first = step_start + team * STEP_POSITIONS;
        const uint team_end = is_active ? end : 0u; // lanes beyond the last whole team read nothing
        uvec4 keys[STEP_RAW], rows[STEP_RAW];
        float values[STEP_VALUES];
        LOAD_STEP(k_cache, own_key, kv_head, first, team_end, position, keys)
        LOAD_STEP(v_cache, own_value, kv_head, first, team_end, position, rows)
        step_scores(keys, values);
        step_softmax(first, team_end, values);
        step_values(rows, values);
    }
    store_partials(first_head);
}
