// Computes  the pairs (row, rank) of a batch's routing grouped by their experts, and tiles: runs of up to tile_columns pairs of
//           one expert, in rising order of experts. Only experts take part that the table has a place for and that are not
//           marked done; those that take part and have pairs become done. So the same dispatch, with other experts in the
//           table, takes up what it left. `clears` does nothing but take all marks away. With `picks` the rows that want
//           logits take part alone.
//           Tiles of experts that are at home (AT_HOME in their entry) come last where n_places is not 0: these experts are
//           brought from there, n_places in each round, to one half of the places and the other in turn, and read there.
// Inputs    routing, of which the first N_USED words of each row_words are the row's ids; params; the expert table by address,
//           uvec2 [n_layers][N_EXPERTS]; done [N_EXPERTS]. Outputs: tiles; sorted_pairs: row * N_USED + rank, rising within an
//           expert, from each tile's first on; brought [ranks]: home and place of each, zeros behind the last.
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
#define TILES_BINDING 3
#define TILES_ACCESS writeonly
#include "tile_list.glsl"
layout(set = 0, binding = 4, std430) writeonly buffer SortedPairs { uint sorted_pairs[]; };
layout(set = 0, binding = 5, std430) writeonly buffer Brought { uvec4 brought[]; };
layout(push_constant, std430) uniform Push {
    uvec2 first_place;       // address
    uint place_bytes;
    uint n_places;           // of a round, half of all; 0: no expert is brought
    uint layer;
    uint row_words;
    uint tile_columns;
    uint clears;
    uint picks;
};

const uint AT_HOME = 1u;              // in the low word of an entry
const uint BLOCK_ROWS = 32u;          // one bit each
const uint NOT_NOW = 0xFFFFFFFFu;     // in next_pair

shared uint next_pair[N_EXPERTS];     // pairs of an expert; then where its next one goes, or NOT_NOW
shared uint chosen_by[N_EXPERTS];     // the rows of a block that chose an expert
shared uvec4 totals[gl_WorkGroupSize.x]; // sizes of a lane's experts

uint lane() { return gl_LocalInvocationIndex; }

uint n_rows() { return picks != 0u ? params.n_picked : params.n_rows; }

// The pair of the i-th row that takes part, counted from 0, and a rank: i * N_USED + rank.
uint pair_of(uint numbered) {
    const uint i = numbered / N_USED, row = picks != 0u ? params.rows[i].picked : i;
    return row * N_USED + numbered % N_USED;
}

uint chosen_id(uint pair) { return routing[pair / N_USED * row_words + pair % N_USED]; }

// Where an expert is; nowhere if it takes no part.
uvec2 entry_of(uint expert) {
    if (done[expert] != 0u) return uvec2(0u);
    return AddressEntry(address_add_product(params.expert_table, layer * N_EXPERTS + expert, 8u)).address;
}

bool is_brought(uvec2 entry) { return n_places != 0u && (entry.x & AT_HOME) != 0u; }

// (pairs, tiles where it is read in place, tiles where it is brought, whether it is brought) of an expert.
uvec4 size_of(uint expert, uvec2 entry) {
    const uint n_pairs = is_null(entry) ? 0u : next_pair[expert];
    const uint n_tiles = (n_pairs + tile_columns - 1u) / tile_columns;
    return is_brought(entry) ? uvec4(n_pairs, 0u, n_tiles, min(n_pairs, 1u)) : uvec4(n_pairs, n_tiles, 0u, 0u);
}

void count_pairs() {
    for (uint e = lane(); e < N_EXPERTS; e += gl_WorkGroupSize.x) next_pair[e] = chosen_by[e] = 0u;
    barrier();
    for (uint p = lane(); p < n_rows() * N_USED; p += gl_WorkGroupSize.x)
        atomicAdd(next_pair[chosen_id(pair_of(p))], 1u);
    barrier();
}

void write_tiles(uvec2 span, uint n_pairs, uint first_pair, uint first_tile) {
    for (uint i = 0u; i * tile_columns < n_pairs; ++i) {
        const uint start = i * tile_columns;
        tiles[first_tile + i] = uvec4(span, first_pair + start, min(tile_columns, n_pairs - start));
    }
}

// Says where the expert of a rank is brought to, and where that one's round begins. Returns its place.
uvec2 bring(uvec2 home, uint rank, uint first_tile) {
    if (rank % n_places == 0u) round_starts[1u + rank / n_places] = first_tile;
    const uvec2 place = address_add_product(first_place, rank % (2u * n_places), place_bytes);
    brought[rank] = uvec4(home, place);
    return place;
}

// Says where the rounds end that have no expert, and that no more are brought.
void end_rounds(uint n_brought, uint n_tiles) {
    round_starts[0] = 0u;
    const uint n_rounds = n_places == 0u ? 0u : (n_brought + n_places - 1u) / max(n_places, 1u);
    for (uint i = n_rounds; i < N_ROUNDS; ++i) round_starts[1u + i] = n_tiles;
    for (uint rank = n_brought; rank < N_EXPERTS + n_places && n_places > 0u; ++rank) brought[rank] = uvec4(0u);
}

// Makes counts of pairs to where they go, each expert's behind those of the experts before it.
void place_experts() {
    const uint n_each = (N_EXPERTS + gl_WorkGroupSize.x - 1u) / gl_WorkGroupSize.x;
    const uint first = min(lane() * n_each, N_EXPERTS), end = min(first + n_each, N_EXPERTS);
    uvec4 total = uvec4(0u);
    for (uint e = first; e < end; ++e) total += size_of(e, entry_of(e));
    totals[lane()] = total;
    barrier();
    uvec4 next = uvec4(0u);
    for (uint i = 0u; i < gl_WorkGroupSize.x; ++i) {
        next += i < lane() ? totals[i] : uvec4(0u);
        next.z += totals[i].y;  // behind all that are read in place
    }
    for (uint e = first; e < end; ++e) {
        const uvec2 entry = entry_of(e), span = uvec2(entry.x & ~AT_HOME, entry.y);
        const uvec4 size = size_of(e, entry);
        if (size.w > 0u) {
            write_tiles(bring(span, next.w, next.z), size.x, next.x, next.z);
        } else {
            write_tiles(span, size.x, next.x, next.y);
        }
        next_pair[e] = size.x > 0u ? next.x : NOT_NOW;
        if (size.x > 0u) done[e] = 1u;
        next += size;
    }
    if (lane() == gl_WorkGroupSize.x - 1u) end_rounds(next.w, next.z);
    barrier();
}

// Places the pairs of up to BLOCK_ROWS rows, of those that take part.
void place_pairs(uint first_row) {
    const uint first = first_row * N_USED, end = min(first_row + BLOCK_ROWS, n_rows()) * N_USED;
    for (uint p = first + lane(); p < end; p += gl_WorkGroupSize.x)
        atomicOr(chosen_by[chosen_id(pair_of(p))], 1u << (p / N_USED - first_row));
    barrier();
    for (uint p = first + lane(); p < end; p += gl_WorkGroupSize.x) {
        const uint pair = pair_of(p), id = chosen_id(pair);
        const uint earlier = chosen_by[id] & ((1u << (p / N_USED - first_row)) - 1u);
        if (next_pair[id] != NOT_NOW) sorted_pairs[next_pair[id] + bitCount(earlier)] = pair;
    }
    barrier();
    for (uint e = lane(); e < N_EXPERTS; e += gl_WorkGroupSize.x) {
        if (next_pair[e] != NOT_NOW) next_pair[e] += bitCount(chosen_by[e]);
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
    [[dont_unroll]] for (uint row = 0u; row < n_rows(); row += BLOCK_ROWS) place_pairs(row);
}
