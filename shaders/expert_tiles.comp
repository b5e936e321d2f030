// Computes  the pairs (row, rank) of a batch's routing grouped by their experts, and tiles: runs of up to tile_columns pairs of
//           one expert, in rising order of experts. Only experts take part that the table has a place for and that are not
//           marked done; those that take part and have pairs become done. So the same dispatch, with other experts in the
//           table, takes up what it left. `clears` does nothing but take all marks away.
// Inputs    routing, of which the first N_USED words of each row_words are the row's ids; params; the expert table by address,
//           uvec2 [n_layers][N_EXPERTS]; done [N_EXPERTS]. Outputs: tiles (uvec4): their number in the first word, then (expert,
//           first, count, 0) of each; sorted_pairs: row * N_USED + rank, rising within an expert, from each tile's `first` on.
// Who       one workgroup: lanes count pairs; each lane places a run of experts behind those of the lanes before it; then
//           all lanes place the pairs of BLOCK_ROWS rows at a time, each behind those of earlier rows that chose its expert.
// Assumes   the ids of a row are valid and distinct, as router_topk leaves them. Atomics only add numbers and set bits: their
//           order is not seen.
// Dispatch  (1, 1, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#define PARAMS_BINDING 1
#include "params.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint N_EXPERTS = 128u;
layout(constant_id = 2) const uint N_USED = 8u;

layout(set = 0, binding = 0, std430) readonly buffer Routing { uint routing[]; };
layout(set = 0, binding = 2, std430) buffer Done { uint done[]; };
layout(set = 0, binding = 3, std430) writeonly buffer Tiles { uvec4 tiles[]; };
layout(set = 0, binding = 4, std430) writeonly buffer SortedPairs { uint sorted_pairs[]; };
layout(push_constant, std430) uniform Push {
    uint layer;
    uint row_words;
    uint tile_columns;
    uint clears;
};

const uint BLOCK_ROWS = 32u;          // one bit each
const uint NOT_NOW = 0xFFFFFFFFu;     // in places

shared uint places[N_EXPERTS];        // pairs of an expert; then where its next one goes, or NOT_NOW
shared uint chosen_by[N_EXPERTS];     // the rows of a block that chose an expert
shared uvec2 totals[gl_WorkGroupSize.x]; // pairs and tiles of a lane's experts

uint lane() { return gl_LocalInvocationIndex; }

uint chosen_id(uint pair) { return routing[pair / N_USED * row_words + pair % N_USED]; }

bool takes_part(uint expert) {
    const uvec2 entry = AddressEntry(address_add_product(params.expert_table, layer * N_EXPERTS + expert, 8u)).address;
    return !is_null(entry) && done[expert] == 0u;
}

// (pairs, tiles) of an expert whose pairs are counted.
uvec2 size_of(uint expert) { return uvec2(places[expert], (places[expert] + tile_columns - 1u) / tile_columns); }

void count_pairs() {
    for (uint e = lane(); e < N_EXPERTS; e += gl_WorkGroupSize.x) places[e] = chosen_by[e] = 0u;
    barrier();
    for (uint p = lane(); p < params.n_rows * N_USED; p += gl_WorkGroupSize.x) atomicAdd(places[chosen_id(p)], 1u);
    barrier();
}

void write_tiles(uint expert, uint first_pair, uint first_tile) {
    const uvec2 size = size_of(expert);
    for (uint i = 0u; i < size.y; ++i) {
        const uint start = i * tile_columns;
        tiles[1u + first_tile + i] = uvec4(expert, first_pair + start, min(tile_columns, size.x - start), 0u);
    }
}

// Makes counts of pairs to places, each expert's behind those of the experts before it.
void place_experts() {
    const uint n_each = (N_EXPERTS + gl_WorkGroupSize.x - 1u) / gl_WorkGroupSize.x;
    const uint first = min(lane() * n_each, N_EXPERTS), end = min(first + n_each, N_EXPERTS);
    uvec2 total = uvec2(0u);
    for (uint e = first; e < end; ++e) {
        if (!takes_part(e)) places[e] = 0u;
        total += size_of(e);
    }
    totals[lane()] = total;
    barrier();
    uvec2 next = uvec2(0u);
    for (uint i = 0u; i < lane(); ++i) next += totals[i];
    for (uint e = first; e < end; ++e) {
        const uvec2 size = size_of(e);
        write_tiles(e, next.x, next.y);
        if (size.x > 0u) done[e] = 1u;
        places[e] = size.x > 0u ? next.x : NOT_NOW;
        next += size;
    }
    if (lane() == gl_WorkGroupSize.x - 1u) tiles[0] = uvec4(next.y, 0u, 0u, 0u);
    barrier();
}

// Places the pairs of up to BLOCK_ROWS rows.
void place_pairs(uint first_row) {
    const uint first = first_row * N_USED, end = min(first_row + BLOCK_ROWS, params.n_rows) * N_USED;
    for (uint p = first + lane(); p < end; p += gl_WorkGroupSize.x)
        atomicOr(chosen_by[chosen_id(p)], 1u << (p / N_USED - first_row));
    barrier();
    for (uint p = first + lane(); p < end; p += gl_WorkGroupSize.x) {
        const uint id = chosen_id(p);
        const uint earlier = chosen_by[id] & ((1u << (p / N_USED - first_row)) - 1u);
        if (places[id] != NOT_NOW) sorted_pairs[places[id] + bitCount(earlier)] = p;
    }
    barrier();
    for (uint e = lane(); e < N_EXPERTS; e += gl_WorkGroupSize.x) {
        if (places[e] != NOT_NOW) places[e] += bitCount(chosen_by[e]);
        chosen_by[e] = 0u;
    }
    barrier();
}

void main() {
    if (clears != 0u) {
        for (uint e = lane(); e < N_EXPERTS; e += gl_WorkGroupSize.x) done[e] = 0u;
        return;
    }
    count_pairs();
    place_experts();
    [[dont_unroll]] for (uint row = 0u; row < params.n_rows; row += BLOCK_ROWS) place_pairs(row);
}
