// Computes  for each row of a batch, in the order of positions, the gated delta rule (Yang et al. 2024, arXiv:2412.06464, eq. 10)
//           in each head of v: S <- decay S; delta = beta (v - k^T S); S <- S + k delta^T; out = q^T S.
// Inputs    mixed f32 rows [q N_KEY_HEADS * HEAD_DIM | k the same | v N_HEADS * HEAD_DIM | decay N_HEADS * N_DECAYS | beta
//           N_HEADS], params; by address the states f32 [regions][N_VERSIONS][N_HEADS][HEAD_DIM rows][HEAD_DIM columns]. A head
//           of v has a decay for each row of S, or one for all. Output: out f32 [N_HEADS * HEAD_DIM].
// Who       a workgroup takes N_COLUMNS columns of a head's S for all rows of a sequence, and keeps them in registers meanwhile; a
//           column is parted among N_PARTS lanes, which have HEAD_DIM / N_PARTS rows each.
// Assumes   N_PARTS divides HEAD_DIM, N_COLUMNS * N_PARTS is the workgroup. The state before position 0 is zero. Version p % N_VERSIONS
//           is the state behind position p.
// Dispatch  (HEAD_DIM / N_COLUMNS, N_HEADS, regions).
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "address.glsl"
#define PARAMS_BINDING 1
#include "params.glsl"
#include "store.glsl"
#include "recurrent.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint HEAD_DIM = 128u;
layout(constant_id = 2) const uint N_KEY_HEADS = 16u;
layout(constant_id = 3) const uint N_HEADS = 32u;
layout(constant_id = 4) const uint TILED = 1u; // head h of v goes with head h % N_KEY_HEADS of k; else neighbours share one
layout(constant_id = 5) const uint N_DECAYS = 1u;
layout(constant_id = 6) const uint N_VERSIONS = 1u;
layout(constant_id = 7) const uint N_COLUMNS = 32u;
layout(constant_id = 8) const uint N_PARTS = 4u;

layout(set = 0, binding = 0, std430) readonly buffer Mixed { float mixed[]; };
layout(set = 0, binding = 2, std430) writeonly buffer Out { float attended[]; };
layout(push_constant, std430) uniform Push {
    uvec2 states;
    uint mixed_pitch; // from row to row
    uint out_pitch;
};

const uint KEY_WIDTH = N_KEY_HEADS * HEAD_DIM, STATE_WORDS = HEAD_DIM * HEAD_DIM, OWN_ROWS = HEAD_DIM / N_PARTS;
const uint MAX_LANES = 256u;
shared vec3 parted[N_PARTS == 1u ? 1u : MAX_LANES];
shared uint first_found;

// The first row of a sequence, n_rows where it has none. Every invocation must call it.
uint first_row(uint sequence) {
    const uint FEW = 8u;
    uint found = params.n_rows;
    if (params.n_rows <= FEW) {
        for (uint row = params.n_rows; row > 0u; --row)
            if (sequence_of(row - 1u) == sequence) found = row - 1u;
        return found;
    }
    if (gl_LocalInvocationIndex == 0u) first_found = params.n_rows;
    barrier();
    for (uint row = gl_LocalInvocationIndex; row < params.n_rows; row += gl_WorkGroupSize.x)
        if (sequence_of(row) == sequence) atomicMin(first_found, row);
    barrier();
    return first_found;
}

// The sum over the parts of a column, in their order. Every invocation must call it.
vec3 column_sums(vec3 own) {
    if (N_PARTS == 1u) return own;
    barrier(); // the sums before have been read
    parted[gl_LocalInvocationIndex] = own;
    barrier();
    vec3 sum = vec3(0.0);
    for (uint i = 0u; i < N_PARTS; ++i) sum += parted[i * N_COLUMNS + gl_LocalInvocationIndex % N_COLUMNS];
    return sum;
}

// Where a row of S has its first column, behind a position.
uvec2 state_row(uint sequence, uint position, uint head, uint d) {
    const uint version = sequence * N_VERSIONS + position % N_VERSIONS;
    return address_add(states, ((version * N_HEADS + head) * STATE_WORDS + d * HEAD_DIM) * 4u);
}

void main() {
    const uint sequence = gl_WorkGroupID.z, head = gl_WorkGroupID.y, lane = gl_LocalInvocationIndex;
    uint row = first_row(sequence);
    if (!continues(row, sequence)) return;
    const uint part = lane / N_COLUMNS, first = part * OWN_ROWS, column = gl_WorkGroupID.x * N_COLUMNS + lane % N_COLUMNS;
    const uint key_head = TILED != 0u ? head % N_KEY_HEADS : head / (N_HEADS / N_KEY_HEADS);
    const uint begin = position_of(row);
    float state[OWN_ROWS];
    [[unroll]] for (uint i = 0u; i < OWN_ROWS; ++i) {
        state[i] = 0.0;
        if (begin > 0u) state[i] = load_float(address_add(state_row(sequence, begin - 1u, head, first + i), column * 4u));
    }
    for (; continues(row, sequence); ++row) {
        const uint at = row * mixed_pitch, query = at + key_head * HEAD_DIM + first, key = query + KEY_WIDTH;
        const uint gates = at + 2u * KEY_WIDTH + N_HEADS * HEAD_DIM, decay = gates + head * N_DECAYS;
        vec3 own = vec3(0.0);
        [[unroll]] for (uint i = 0u; i < OWN_ROWS; ++i) {
            const float q = mixed[query + i], k = mixed[key + i];
            state[i] *= mixed[decay + (N_DECAYS == 1u ? 0u : first + i)];
            own += vec3(k, q, q) * vec3(state[i], state[i], k);
        }
        const vec3 sums = column_sums(own);
        const float value = mixed[at + 2u * KEY_WIDTH + head * HEAD_DIM + column];
        const float delta = mixed[gates + N_HEADS * N_DECAYS + head] * (value - sums.x);
        [[unroll]] for (uint i = 0u; i < OWN_ROWS; ++i) state[i] = fma(mixed[key + i], delta, state[i]);
        if (part == 0u) attended[row * out_pitch + head * HEAD_DIM + column] = fma(sums.z, delta, sums.y);
        if (continues(row + N_VERSIONS, sequence)) continue; // a later row has the place of this version
        [[unroll]] for (uint i = 0u; i < OWN_ROWS; ++i)
            store_kept(address_add(state_row(sequence, position_of(row), head, first + i), column * 4u), state[i]);
    }
}
