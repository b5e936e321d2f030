// Computes  the pairs (row, rank) of a batch's routing grouped by their experts, and tiles: runs of up to tile_columns pairs of
//           one expert, in rising order of experts. Only experts take part that the table has a place for and that are not
//           marked done; those that take part and have pairs become done. So the same dispatch, with other experts in the
//           table, takes up what it left. `clears` does nothing but take all marks away. With `picks` the rows that want
//           logits take part alone.
//           Experts that are at home (AT_HOME in their entry) are brought from there where n_places is not 0: from round 1 on,
//           at most n_places in each, to one half of the places and the other in turn. Their tiles are in those rounds. Other
//           tiles lie evenly in the rounds beside which others are brought.
// Inputs    routing, of which the first N_USED words of each row_words are the row's ids; params; the expert table by address,
//           uvec2 [n_layers][N_EXPERTS]; done [N_EXPERTS]. Outputs: tiles; sorted_pairs: row * N_USED + rank, rising within an
//           expert, from each tile's first on; brought [rounds][n_places]: home and place, or zeros.
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
shared uint brought_starts[N_ROUNDS + 1u]; // tiles of experts that are brought before each round, of those that bring some

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

// How the tiles of a layer lie in rounds.
struct Rounds {
    uint n_in_place; // tiles
    uint n_brought;  // tiles
    uint n_each;     // experts that a round brings
    uint last;       // the last round that brings any
};

// Experts that are brought are spread over all rounds there are: each round's copies run beside the tiles of the one before.
Rounds rounds_of(uvec4 all) {
    if (n_places == 0u) return Rounds(all.y, 0u, 1u, 0u);
    const uint n_rounds = (N_EXPERTS + n_places - 1u) / n_places;
    const uint n_each = max(1u, (all.w + n_rounds - 1u) / n_rounds);
    return Rounds(all.y, all.z, n_each, (all.w + n_each - 1u) / n_each);
}

// Tiles that are read in place lie evenly in the rounds beside which another one is brought.
uint round_of(Rounds rounds, uint tile) { return tile * max(rounds.last, 1u) / rounds.n_in_place; }

// Tiles that are read in place before a round.
uint in_place_before(Rounds rounds, uint index) {
    const uint n = max(rounds.last, 1u);
    return min((index * rounds.n_in_place + n - 1u) / n, rounds.n_in_place);
}

uint brought_before(Rounds rounds, uint index) {
    if (index > rounds.last) return rounds.n_brought;
    return index == 0u ? 0u : brought_starts[index];
}

void write_tile(uint number, uvec2 span, uint n_pairs, uint first_pair, uint index) {
    const uint start = index * tile_columns;
    tiles[number] = uvec4(span, first_pair + start, min(tile_columns, n_pairs - start));
}

// Writes the tiles of an expert that is read in place, behind `before` other tiles of such.
void write_in_place(Rounds rounds, uvec2 span, uint n_pairs, uint first_pair, uint before) {
    for (uint i = 0u; i * tile_columns < n_pairs; ++i) {
        const uint tile = before + i, number = tile + brought_before(rounds, round_of(rounds, tile));
        write_tile(number, span, n_pairs, first_pair, i);
    }
}

// Writes the tiles of an expert that is brought, and where it is brought from and to.
void write_brought(Rounds rounds, uvec2 home, uint n_pairs, uint first_pair, uint rank, uint before) {
    const uint round_index = rank / rounds.n_each, at = round_index * n_places + rank % rounds.n_each;
    const uvec2 place = address_add_product(first_place, at % (2u * n_places), place_bytes);
    brought[at] = uvec4(home, place);
    const uint first = before + in_place_before(rounds, 2u + round_index);
    for (uint i = 0u; i * tile_columns < n_pairs; ++i) write_tile(first + i, place, n_pairs, first_pair, i);
}

// Says where rounds begin, and where none is brought.
void write_rounds(Rounds rounds, uint n_brought) {
    for (uint i = lane(); i <= N_ROUNDS; i += gl_WorkGroupSize.x)
        round_starts[i] = in_place_before(rounds, i) + brought_before(rounds, i);
    if (n_places == 0u) return;
    for (uint at = lane(); at < N_EXPERTS + n_places; at += gl_WorkGroupSize.x) {
        const uint index = at % n_places, rank = at / n_places * rounds.n_each + index;
        if (index >= rounds.n_each || rank >= n_brought) brought[at] = uvec4(0u);
    }
}

// Makes counts of pairs to where they go, each expert's behind those of the experts before it.
void place_experts() {
    const uint n_of_lane = (N_EXPERTS + gl_WorkGroupSize.x - 1u) / gl_WorkGroupSize.x;
    const uint first = min(lane() * n_of_lane, N_EXPERTS), end = min(first + n_of_lane, N_EXPERTS);
    uvec4 total = uvec4(0u), all = uvec4(0u), next = uvec4(0u);
    for (uint e = first; e < end; ++e) total += size_of(e, entry_of(e));
    totals[lane()] = total;
    barrier();
    for (uint i = 0u; i < gl_WorkGroupSize.x; ++i) {
        next += i < lane() ? totals[i] : uvec4(0u);
        all += totals[i];
    }
    const Rounds rounds = rounds_of(all);
    uvec2 ranked = next.zw;
    for (uint e = first; e < end; ++e) {
        const uvec4 size = size_of(e, entry_of(e));
        if (size.w > 0u && ranked.y % rounds.n_each == 0u) brought_starts[1u + ranked.y / rounds.n_each] = ranked.x;
        ranked += size.zw;
    }
    barrier();
    write_rounds(rounds, all.w);
    for (uint e = first; e < end; ++e) {
        const uvec2 entry = entry_of(e), span = uvec2(entry.x & ~AT_HOME, entry.y);
        const uvec4 size = size_of(e, entry);
        if (size.w > 0u) {
            write_brought(rounds, span, size.x, next.x, next.w, next.z);
        } else {
            write_in_place(rounds, span, size.x, next.x, next.y);
        }
        next_pair[e] = size.x > 0u ? next.x : NOT_NOW;
        if (size.x > 0u) done[e] = 1u;
        next += size;
    }
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
