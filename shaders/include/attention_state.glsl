// Registers, shared memory and team sums of attention.comp and latent_attention.comp.
// Arrays in registers are indexed only by loops that unroll completely: an inner loop of unknown length would keep the outer
// one rolled, and the arrays would move to memory.
// Needs: GL_EXT_control_flow_attributes, kv_types.glsl, hadamard.glsl; N_SPLITS, TEAM_LANES, STEP_POSITIONS, WORKGROUP_HEADS; ROW_DIM, the width of a key,
// VALUE_DIM, of a value, both of whole units; INPUT_ROWS, the rows that are staged on the way in. (Macros: a constant that
// is another one's alias would take over its name in SPIR-V.)
const uint WORKGROUP_LANES = gl_WorkGroupSize.x;
const uint VALUE_UNITS = VALUE_DIM / 8u;
const uint LANE_UNITS = (UNITS + TEAM_LANES - 1u) / TEAM_LANES; // unit of lane: team_lane + j * TEAM_LANES
const uint VALUE_LANE_UNITS = VALUE_UNITS / TEAM_LANES;
const uint N_TEAMS = WORKGROUP_LANES / TEAM_LANES;      // the remaining lanes idle
const uint ACTIVE_LANES = N_TEAMS * TEAM_LANES;
const uint STEP_RAW = STEP_POSITIONS * LANE_UNITS * UNIT_RAW;
const uint QUERY_VECTORS = WORKGROUP_HEADS * LANE_UNITS * 2u;
const uint OUT_VECTORS = WORKGROUP_HEADS * VALUE_LANE_UNITS * 2u;
const uint STEP_VALUES = STEP_POSITIONS * WORKGROUP_HEADS;
const uint STEP_ROWS = N_TEAMS * STEP_POSITIONS; // of all teams
// Values summed at once: the scores of a step, or the squares of the rows on the way in.
const uint TEAM_VALUES = STEP_VALUES > INPUT_ROWS ? STEP_VALUES : INPUT_ROWS;
const uint INPUT_WORDS = INPUT_ROWS * ROW_DIM, TEAM_WORDS = N_TEAMS * VALUE_DIM;
const uint PART_STRIDE = WORKGROUP_LANES + N_TEAMS + 1u; // one gap per team against bank conflicts
const float LOWEST = -3.0e38;
// Whether a step's rows are asked for before they are needed. CPU drivers, whose workgroups have 8 lanes, have them at once,
// and would copy what is kept from one step to the next.
const bool LOADS_AHEAD = WORKGROUP_LANES > 8u;

shared float stage[TEAM_WORDS > INPUT_WORDS ? TEAM_WORDS : INPUT_WORDS]; // rows on the way in, one row per team on the way out
shared float lane_part[TEAM_VALUES * PART_STRIDE];
shared float team_total[TEAM_VALUES * N_TEAMS];
shared float team_max[WORKGROUP_HEADS * N_TEAMS];

vec4 query[QUERY_VECTORS];       // [head][lane unit][low, high], scaled
vec4 running_out[OUT_VECTORS];    // [head][lane unit of the value][low, high]
float running_max[WORKGROUP_HEADS];
float running_sum[WORKGROUP_HEADS];
uint lane;       // 0 ... WORKGROUP_LANES - 1
uint team;       // N_TEAMS for idle lanes
uint team_lane;
bool is_active;
bool team_is_subgroup;

#ifdef USE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif

// Where teams and subgroups coincide, lanes are numbered by subgroup and sums need no shared memory. The number of subgroups
// tells: their size is a power of two, so that many of them fill the workgroup only if each holds one team.
void find_team() {
    lane = gl_LocalInvocationIndex;
    team_is_subgroup = false;
#ifdef USE_SUBGROUP
    if ((TEAM_LANES & (TEAM_LANES - 1u)) == 0u && gl_NumSubgroups * TEAM_LANES == WORKGROUP_LANES) {
        lane = gl_SubgroupID * TEAM_LANES + gl_SubgroupInvocationID;
        team_is_subgroup = true;
    }
#endif
    team = lane / TEAM_LANES;
    team_lane = lane % TEAM_LANES;
    is_active = ACTIVE_LANES == WORKGROUP_LANES || lane < ACTIVE_LANES;
}

void clear_sums() {
    [[unroll]] for (uint h = 0u; h < WORKGROUP_HEADS; ++h) {
        running_max[h] = LOWEST;
        running_sum[h] = 0.0;
    }
    [[unroll]] for (uint i = 0u; i < OUT_VECTORS; ++i) running_out[i] = vec4(0.0);
}

// Transforms rows in the stage, `n` dims at a time (1: none). Every invocation must call it, once the rows are staged.
#define TRANSFORM_STAGE(n_rows, n) TRANSFORM(stage, (n_rows) * ROW_DIM, n, lane, WORKGROUP_LANES)

// Where a lane leaves its part of value `i`.
uint part_index(uint i) { return i * PART_STRIDE + lane + team; }

// team_total[value][team] = the sum over the team's lanes of the first `n_values` parts, in a fixed order.
void sum_parts(uint n_values) {
    barrier();
    for (uint pair = lane; pair < n_values * N_TEAMS; pair += WORKGROUP_LANES) {
        const uint first = pair / N_TEAMS * PART_STRIDE + pair % N_TEAMS * (TEAM_LANES + 1u);
        float sum = 0.0;
        for (uint i = 0u; i < TEAM_LANES; ++i) sum += lane_part[first + i];
        team_total[pair] = sum;
    }
    barrier();
}

// Replaces each value by its sum over the team, in a fixed order. Every invocation must call it.
void team_sums(inout float values[STEP_VALUES]) {
#ifdef USE_SUBGROUP
    if (team_is_subgroup) {
        [[unroll]] for (uint i = 0u; i < STEP_VALUES; ++i) values[i] = subgroupAdd(values[i]);
        return;
    }
#endif
    [[unroll]] for (uint i = 0u; i < STEP_VALUES; ++i) lane_part[part_index(i)] = values[i];
    sum_parts(STEP_VALUES);
    const uint column = min(team, N_TEAMS - 1u);
    [[unroll]] for (uint i = 0u; i < STEP_VALUES; ++i) values[i] = team_total[i * N_TEAMS + column];
}

// Value `i` of the last sum_parts summed over the workgroup.
float workgroup_total(uint i) {
    float sum = 0.0;
    [[unroll]] for (uint t = 0u; t < N_TEAMS; ++t) sum += team_total[i * N_TEAMS + t];
    return sum;
}
