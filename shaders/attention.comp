// Computes  out_h = sum over t of softmax_t(scale * q_h . k_t) * v_t for each row of a batch and the last `window` positions (0
//           = all) of its sequence, after norm and RoPE of q and k, and the norm of v if VALUE_NORM: per head and split the unnormalised sum, the running
//           maximum and the running sum of weights; attention_combine joins them.
// Inputs    qkv f32 [N_HEADS*HEAD_DIM | N_KV_HEADS*HEAD_DIM | the same] raw; by address the K and V caches [N_KV_HEADS]
//           [PLACES][HEAD_DIM] (kv_types.glsl), norm gains, and the RoPE table (cos, sin) [context][ROTARY_DIM/2]. Output:
//           partials [N_HEADS][N_SPLITS][HEAD_DIM + 2]. The split that owns the position appends k and v to the caches. Rows of
//           the batch lie a pitch behind one another. Where rows may be of one sequence
//           there are two dispatches: one in which all append (mode APPEND), and one in which all read what is cached (mode
//           READ). A layer that sees the caches of another has the latter alone, and makes nothing of the words behind q.
// Who       a team of TEAM_LANES lanes reads one position, 8 dims per lane and unit, for WORKGROUP_HEADS query heads at once,
//           so K and V are read once; teams take STEP_POSITIONS positions per step, each with its own online softmax.
// Assumes   TEAM_LANES divides HEAD_DIM/8, WORKGROUP_HEADS divides N_HEADS/N_KV_HEADS; rows that are seen are filled.
// Dispatch  (N_HEADS / WORKGROUP_HEADS, N_SPLITS, rows); mode APPEND: (N_HEADS / WORKGROUP_HEADS, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.z
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
layout(constant_id = 11) const uint K_TYPE = 0u; // see kv_types.glsl
layout(constant_id = 12) const uint V_TYPE = 0u;
layout(constant_id = 13) const uint VALUE_NORM = 0u; // of v of each kv head, without a gain
layout(constant_id = 14) const uint RING = 0u; // see kv_types.glsl
layout(constant_id = 15) const uint K_HADAMARD = 1u; // dims of q and k, and of v, that are transformed together; 1: none are
layout(constant_id = 16) const uint V_HADAMARD = 1u;

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
    uint window; // positions seen, this one included; 0 = all
    uint mode;
    uint n_regions;
    uint qkv_pitch;     // from row to row of the batch
    uint partials_pitch;
};

const uint HEADS_PER_KV = N_HEADS / N_KV_HEADS;
uint first_qkv; // word at which the row's q begins
#define CACHED_DIM HEAD_DIM
#define ROW_DIM HEAD_DIM
#define VALUE_DIM HEAD_DIM
#define INPUT_ROWS (WORKGROUP_HEADS + 1u) // query heads and k
#define N_CACHES 2u
#define KEYS 0u
#define VALUES 1u

#include "attention_split.glsl"
#include "kv_types.glsl"
#include "attention_state.glsl"
#include "hadamard.glsl"
#include "attention_rope.glsl"
#include "attention_input.glsl"
#include "attention_cache.glsl"
#include "attention_step.glsl"
#include "attention_partials.glsl"

void main() {
    const uint first_head = gl_WorkGroupID.x * WORKGROUP_HEADS;
    const uint kv_head = first_head / HEADS_PER_KV;
    if (ROW >= params.n_rows) return;
    const uint position = current_position(context);
    const uint seen = first_seen(position, window);
    const uint length = split_positions(position - seen);
    const uint start = seen + gl_WorkGroupID.y * length;
    if (start > position) return; // an unused split: attention_combine skips it by the same formula
    const uint end = min(start + length, position + 1u), filled = filled_end(end, position);
    first_qkv = ROW * qkv_pitch;
    const uvec2 keys_at = region_start(K_TYPE, k_cache), values_at = region_start(V_TYPE, v_cache);

    find_team();
    uint first = start + team * STEP_POSITIONS; // of this team's positions
    const uint team_end = is_active ? end : 0u;  // the lanes beyond the last whole team see none
    uvec4 keys[STEP_RAW], rows[STEP_RAW];
    if (LOADS_AHEAD) {
        LOAD_STEP(K_TYPE, keys_at, kv_head, first, filled, keys)
        LOAD_STEP(V_TYPE, values_at, kv_head, first, filled, rows)
    }
    load_query(first_head, kv_head, position);
    const bool is_first_of_kv = first_head % HEADS_PER_KV == 0u;
    if (appends(end, position)) {
        stage_value(kv_head);
        append_position(keys_at, values_at, kv_head, position, is_first_of_kv);
    }
    if (mode == APPEND) return;

    clear_sums();
    for (uint next_start = start + STEP_ROWS; true; next_start += STEP_ROWS) {
        const uint next = first + STEP_ROWS;
        const bool is_last = next_start >= end;
        float values[STEP_VALUES];
        if (!LOADS_AHEAD) { LOAD_STEP(K_TYPE, keys_at, kv_head, first, filled, keys) }
        TAKE_OWN(KEYS, first, end, position, keys)
        step_scores(keys, values);
        // Arrives while the values are added.
        if (LOADS_AHEAD && !is_last) { LOAD_STEP(K_TYPE, keys_at, kv_head, next, filled, keys) }
        step_softmax(first, team_end, values);
        if (!LOADS_AHEAD) { LOAD_STEP(V_TYPE, values_at, kv_head, first, filled, rows) }
        TAKE_OWN(VALUES, first, end, position, rows)
        step_values(rows, values);
        if (is_last) break;
        if (LOADS_AHEAD) { LOAD_STEP(V_TYPE, values_at, kv_head, next, filled, rows) }
        first = next;
    }
    store_partials(first_head);
}
