// The end of a split: the teams' online softmaxes joined and written as partials [head][split][VALUE_DIM + 2] of a row.
// Needs: attention_state.glsl, ROW, the array `partials` and the push constant `partials_pitch`.
// Writes one lane's share of a head: straight to the partials if there is one team, else to the team's row of the stage.
void store_out(uint h, float fade, uint row) {
    [[unroll]] for (uint i = 0u; i < VALUE_LANE_UNITS * 2u; ++i) {
        const uint d = (team_lane + i / 2u * TEAM_LANES) * 8u + i % 2u * 4u;
        const vec4 faded = running_out[h * VALUE_LANE_UNITS * 2u + i] * fade;
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
            if (N_TEAMS == 1u) partials[row + d + c] = faded[c];
            else stage[team * VALUE_DIM + d + c] = faded[c];
        }
    }
}

// Sums the stage's rows in team order into one head's partials.
void join_teams(uint row) {
    barrier();
    [[unroll]] for (uint i = 0u; i < (VALUE_DIM + WORKGROUP_LANES - 1u) / WORKGROUP_LANES; ++i) {
        const uint d = i * WORKGROUP_LANES + lane;
        if (d < VALUE_DIM) {
            float sum = 0.0;
            [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) sum += stage[t * VALUE_DIM + d];
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
        const uint row = ROW * partials_pitch + ((first_head + h) * N_SPLITS + gl_WorkGroupID.y) * (VALUE_DIM + 2u);
        float top = LOWEST, total = 0.0;
        [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) top = max(top, team_max[h * N_TEAMS + t]);
        [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) {
            total += team_total[h * N_TEAMS + t] * exp(team_max[h * N_TEAMS + t] - top);
        }
        if (is_active) store_out(h, exp(running_max[h] - top), row);
        if (N_TEAMS > 1u) join_teams(row);
        if (lane == 0u) {
            partials[row + VALUE_DIM] = top;
            partials[row + VALUE_DIM + 1u] = total;
        }
    }
}
