// Computes  out[r][h] = sum over t of softmax_t(scale * q[r][h] . k_t) * v_t for rows of prompts, over the positions t of row r's
//           sequence that it sees: the last `window` up to its own (0 = all). A sink is a logit more in the softmax's
//           denominator (gpt-oss). Of latent attention, k_t is a cached row, and v_t its first VALUE_DIM dims.
// Inputs    queries f32, row r from word r*query_pitch on: [N_HEADS][VALUE_DIM], after norm and RoPE; where ROW_DIM is more, the
//           other dims of head h from word rest_offset + r*rest_pitch + h*rest_stride of `rest` on; params; by address the
//           K and V caches [regions][N_KV_HEADS][PLACES][ROW_DIM] (kv_types.glsl), with these rows in place, and sinks f32
//           [N_HEADS] (null = none). Output: out f32, row r from word r*out_pitch on: [N_HEADS*VALUE_DIM].
// Who       a column is a head of a row. A workgroup takes COLUMNS columns that share a kv head, rows in order, and walks the cache
//           for all of them at once: see include/prompt_tile.glsl (GPUs), prompt_matrix.glsl (those with matrix units) and
//           prompt_lanes.glsl (CPU drivers).
// Assumes   a column's sums are made in steps of absolute positions, each of which leaves alone a column that sees nothing of it:
//           no other column, and no cut of the rows, has a say in its bits, nor has what is not finite where a row does not see
//           it. Rows from n_rows on are inert.
// Dispatch  (x, N_KV_HEADS, z), where x * z is at least ceil(rows * N_HEADS / N_KV_HEADS / COLUMNS).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "address.glsl"
#define PARAMS_BINDING 1
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint ROW_DIM = 128u;
layout(constant_id = 2) const uint VALUE_DIM = 128u;
layout(constant_id = 3) const uint N_HEADS = 32u;
layout(constant_id = 4) const uint N_KV_HEADS = 4u;
layout(constant_id = 5) const uint WORKGROUP_HEADS = 32u;
layout(constant_id = 6) const uint K_TYPE = 0u; // see kv_types.glsl; equal where a row is key and value
layout(constant_id = 7) const uint V_TYPE = 0u;
layout(constant_id = 8) const uint RING = 0u; // see kv_types.glsl
layout(constant_id = 9) const uint MATRIX_ROWS = 16u; // these four with MATRIX_TILES: what matrix units multiply at once
layout(constant_id = 10) const uint MATRIX_COLUMNS = 16u;
layout(constant_id = 11) const uint MATRIX_DEPTH = 16u;
layout(constant_id = 12) const uint SUBGROUP_SIZE = 32u;

layout(set = 0, binding = 0, std430) readonly buffer Queries { float queries[]; };
layout(set = 0, binding = 2, std430) readonly buffer Rest { float rest[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Out { float out_heads[]; };
layout(push_constant, std430) uniform Push {
    uvec2 k_cache;
    uvec2 v_cache;
    uvec2 sinks;
    uint context;
    uint n_regions; // of a cache
    uint window; // positions seen, a row's own included; 0 = all
    float scale;
    uint query_pitch;
    uint rest_offset;
    uint rest_pitch;
    uint rest_stride;
    uint out_pitch;
};

#define COLUMNS WORKGROUP_HEADS // a column is a head of a row
#define CACHED_DIM ROW_DIM
#include "kv_rows.glsl"

const uint GROUP = N_HEADS / N_KV_HEADS; // columns of a row that share a kv head
const uint VALUE_UNITS = VALUE_DIM / 8u;
const bool IS_LATENT = ROW_DIM != VALUE_DIM;
const float LARGEST = 3.0e38; // so that infinite sinks leave no NaN

// Positions first ... last.
struct Positions {
    uint first;
    uint last;
};
const Positions NOTHING = Positions(1u, 0u);

bool includes(Positions range, uint position) { return position >= range.first && position <= range.last; }

// Rows first ... end - 1, which are of one sequence, and all that they see.
struct Run {
    uint first;
    uint end;
    uint sequence;
    Positions seen;
};

uint first_column() { return (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS; }
uint kv_head() { return gl_WorkGroupID.y; }
uint column_row(uint column) { return (first_column() + column) / GROUP; }
uint column_head(uint column) { return kv_head() * GROUP + (first_column() + column) % GROUP; }
bool is_inert(uint column) { return column_row(column) >= params.n_rows; }

Positions seen_by(uint row) {
    const uint position = row_position(row);
    return Positions(window != 0u && position >= window ? position - window + 1u : 0u, position);
}

// What a column sees in a run.
Positions seen_in(Run run, uint column) {
    const uint row = column_row(column);
    return row >= run.first && row < run.end ? seen_by(row) : NOTHING;
}

// The run that begins at a row of this workgroup.
Run find_run(uint row, uint end_row) {
    Run run = Run(row, row, params.rows[row].sequence, seen_by(row));
    for (; run.end < end_row && params.rows[run.end].sequence == run.sequence; ++run.end) {
        const Positions seen = seen_by(run.end);
        run.seen = Positions(min(run.seen.first, seen.first), max(run.seen.last, seen.last));
    }
    return run;
}

// Four dims of a column's query, scaled; zeros beyond the row and for inert columns.
vec4 query4(uint column, uint d) {
    if (d >= ROW_DIM || is_inert(column)) return vec4(0.0);
    const uint row = column_row(column), head = column_head(column);
    vec4 values;
    if (!IS_LATENT || d < VALUE_DIM) {
        const uint at = row * query_pitch + head * VALUE_DIM + d;
        values = vec4(queries[at], queries[at + 1u], queries[at + 2u], queries[at + 3u]);
    } else {
        const uint at = rest_offset + row * rest_pitch + head * rest_stride + d - VALUE_DIM;
        values = vec4(rest[at], rest[at + 1u], rest[at + 2u], rest[at + 3u]);
    }
    return scale * values;
}

// What the sums of a column are multiplied by at last: `top` is the maximum that its weights are relative to, `total` their sum.
float closing_factor(uint column, float top, float total) {
    if (is_null(sinks)) return 1.0 / total;
    const float sink = clamp(load_float(address_add(sinks, column_head(column) * 4u)), -LARGEST, LARGEST);
    const float higher = max(top, sink), fade = exp(top - higher);
    return fade / (total * fade + exp(sink - higher));
}

// What remains of sums whose weights were relative to `before`.
float fade_of(float before, float top) { return before == top ? 1.0 : exp(before - top); }

void store_unit(uint column, uint unit, vec4 low, vec4 high) {
    if (is_inert(column)) return;
    const uint at = column_row(column) * out_pitch + column_head(column) * VALUE_DIM + unit * 8u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) out_heads[at + i] = low[i];
    [[unroll]] for (uint i = 0u; i < 4u; ++i) out_heads[at + 4u + i] = high[i];
}

#ifdef ONE_SUBGROUP
#include "prompt_lanes.glsl"
#elif defined(MATRIX_TILES)
#include "prompt_matrix.glsl"
#else
#include "prompt_tile.glsl"
#endif

void main() {
    if (is_inert(0u)) return;
    const uint end_row = min(column_row(COLUMNS - 1u) + 1u, params.n_rows);
    begin_columns();
    for (uint row = column_row(0u); row < end_row;) {
        const Run run = find_run(row, end_row);
        walk(run);
        row = run.end;
    }
    store_columns();
}
