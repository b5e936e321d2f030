// Computes  out_h = sum over t of softmax_t(scale * (absorbed_h . c_t + rope(q_h) . r_t)) * c_t for each row of a batch:
//           multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, 2.1), all heads sharing one row [c
//           | r] per position, c after RMSNorm, r after RoPE. Leaves partials as attention.comp does; attention_combine joins
//           them.
// Inputs    absorbed f32 [N_HEADS][KV_RANK]; q f32 [N_HEADS][NOPE_DIM + ROPE_DIM] and kv f32 [KV_RANK + ROPE_DIM], raw, from
//           words q_offset and kv_offset; by address the cache [context][KV_RANK + ROPE_DIM] (kv_types.glsl), c's gain [KV_RANK],
//           and the RoPE table (cos, sin) [context][ROPE_DIM/2]. Output: partials [N_HEADS][N_SPLITS][KV_RANK + 2]. The split
//           that owns the position appends the token's row to the cache. Rows of the batch lie a pitch behind one another.
//           Modes are those of attention.comp.
// Who       a team of TEAM_LANES lanes loads one row, 8 dims per lane and unit, once: for scores and sums of WORKGROUP_HEADS
//           heads. Teams take STEP_POSITIONS positions per step, each with its own online softmax.
// Assumes   TEAM_LANES divides KV_RANK/8, 8 divides ROPE_DIM, WORKGROUP_HEADS divides N_HEADS; rows below the position are
//           filled.
// Dispatch  (N_HEADS / WORKGROUP_HEADS, N_SPLITS, rows); mode APPEND: (N_HEADS / WORKGROUP_HEADS, 1, rows).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "address.glsl"
#define PARAMS_BINDING 1
#define ROW gl_WorkGroupID.z
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint KV_RANK = 512u;
layout(constant_id = 2) const uint ROPE_DIM = 64u;
layout(constant_id = 3) const uint NOPE_DIM = 128u;
layout(constant_id = 4) const uint ROPE_STYLE = 1u; // 0 = halves (neox), 1 = adjacent pairs
layout(constant_id = 5) const uint N_SPLITS = 1u;
layout(constant_id = 6) const uint TEAM_LANES = 8u;
layout(constant_id = 7) const uint STEP_POSITIONS = 2u;
layout(constant_id = 8) const uint WORKGROUP_HEADS = 4u;
layout(constant_id = 9) const uint K_TYPE = 0u; // see kv_types.glsl; a row is key and value
layout(constant_id = 10) const uint K_HADAMARD = 1u; // dims of queries and rows that are transformed together; 1: none are

layout(set = 0, binding = 0, std430) readonly buffer Absorbed { float absorbed[]; };
layout(set = 0, binding = 2, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = 3, std430) readonly buffer Kv { float kv[]; };
layout(set = 0, binding = 4, std430) writeonly buffer Partials { float partials[]; };
layout(push_constant, std430) uniform Push {
    uvec2 rows;
    uvec2 rope_table;
    uvec2 gain;
    uint context;
    uint q_offset;
    uint kv_offset;
    float eps;
    float scale;
    uint mode;
    uint n_regions;
    uint absorbed_pitch;    // from row to row of the batch
    uint q_pitch;
    uint kv_pitch;
    uint partials_pitch;
};

#define ROTARY_DIM ROPE_DIM
#define V_TYPE K_TYPE
#define N_KV_HEADS 1u
#define CACHED_DIM (KV_RANK + ROPE_DIM)
#define RING 0u
#define ROW_DIM CACHED_DIM
#define VALUE_DIM KV_RANK
#define INPUT_ROWS WORKGROUP_HEADS // query heads; then, in their place, this token's row
#define N_CACHES 1u
#define KEYS 0u
#define VALUES 0u

#include "attention_split.glsl"
#include "kv_types.glsl"
#include "attention_state.glsl"
#include "hadamard.glsl"
#include "attention_rope.glsl"
#include "latent_input.glsl"
#include "attention_cache.glsl"
#include "attention_step.glsl"
#include "attention_partials.glsl"

void main() {
    const uint first_head = gl_WorkGroupID.x * WORKGROUP_HEADS;
    if (ROW >= params.n_rows) return;
    const uint position = current_position(context);
    const uint length = split_positions(position);
    const uint start = gl_WorkGroupID.y * length;
    if (start > position) return; // an unused split: attention_combine skips it by the same formula
    const uint end = min(start + length, position + 1u), filled = filled_end(end, position);
    const uvec2 rows_at = region_start(K_TYPE, rows);

    find_team();
    uint first = start + team * STEP_POSITIONS; // of this team's positions
    const uint team_end = is_active ? end : 0u;  // the lanes beyond the last whole team see none
    uvec4 loaded_rows[STEP_RAW];
    if (LOADS_AHEAD) { LOAD_STEP(K_TYPE, rows_at, 0u, first, filled, loaded_rows) }
    load_query(first_head, position);
    if (appends(end, position)) {
        stage_row(position);
        append_position(rows_at, rows_at, 0u, position, first_head == 0u);
    }
    if (mode == APPEND) return;

    clear_sums();
    for (uint next_start = start + STEP_ROWS; true; next_start += STEP_ROWS) {
        float values[STEP_VALUES];
        if (!LOADS_AHEAD) { LOAD_STEP(K_TYPE, rows_at, 0u, first, filled, loaded_rows) }
        TAKE_OWN(KEYS, first, end, position, loaded_rows)
        step_scores(loaded_rows, values);
        step_softmax(first, team_end, values);
        step_values(loaded_rows, values);
        if (next_start >= end) break;
        first += STEP_ROWS;
        if (LOADS_AHEAD) { LOAD_STEP(K_TYPE, rows_at, 0u, first, filled, loaded_rows) }
    }
    store_partials(first_head);
}
