// Dot products of N_DOTS weight rows with COLUMNS vectors of activations, summed over n_slots (one for a plain matrix, the used
// experts for the down projection). A chunk of weights is unpacked once for all columns; what is done for one is the same, and
// in the same order, whatever their number. Two mappings of the same sum:
//   default         lanes share a block: chunk i of the flattened [slot][block][chunk] goes to lane i % workgroup size. All
//                   that a lane needs of several rows is loaded before the first is unpacked. For real GPUs, whose caches
//                   serve words that neighbouring lanes share.
//   BLOCK_PER_LANE  a lane takes whole blocks, the words that its chunks share in registers. For CPU drivers, where a load
//                   costs the same whatever its address: activations are loaded once for all rows, headers once a block.
// Needs: address.glsl, weight_row.glsl, a TYPE_ define, the constants N_DOTS, COLUMNS and LOADED_WORDS (16-byte words that a
// lane loads before it unpacks the first, at least one row's), and from the op
//   WeightRow slot_matrix(uint slot)                   where the rows of a slot are counted from
//   WeightRow dot_row(WeightRow matrix, uint r)        row r of this workgroup in it
//   vec4 activation4(uint slot, uint column, uint index4)  four activations
//   float slot_weight(uint slot)                       what the slot's dot product is multiplied by
// Gives prepare_dots(), which all lanes call first, and dot_rows(n_slots, n_blocks, dots): this lane's part of each,
// [COLUMNS][N_DOTS].
#ifndef BLOCK_PER_LANE
#define SHARED_CODE_BOOK
#endif
#include "weights.glsl"

const uint N_PRODUCTS = COLUMNS * N_DOTS;

// A chunk of weights as numbers, see weights.glsl.
struct Unpacked {
    vec4 q[8];
    vec4 scale;
};

Unpacked unpacked(WeightChunk chunk, uint block, uint t) {
    Unpacked numbers;
    unpack_chunk(chunk, block, t, numbers.q, numbers.scale);
    return numbers;
}

// A chunk of activations, and the sums of its two groups, which min terms multiply.
struct Activations {
    vec4 x[8];
    vec2 sums;
};

float sum4(vec4 v) {
    precise float sum = (v.x + v.y) + (v.z + v.w);
    return sum;
}

// The dot product of one chunk.
// precise, here and wherever a weight's dot product is made: a driver that contracts or reorders could else do so in one
// variant of a kernel and not in another, and where an expert lies or what is beside a token would change the answer.
float chunk_dot(Unpacked w, Activations a) {
    precise vec4 first = w.q[0] * a.x[0];
    precise vec4 second = w.q[4] * a.x[4];
    [[unroll]] for (uint i = 1u; i < 4u; ++i) {
        first = fma(w.q[i], a.x[i], first);
        second = fma(w.q[i + 4u], a.x[i + 4u], second);
    }
#ifdef Q_UNIT
    precise float result = fma(w.scale.x, Q_UNIT * sum4(first), w.scale.z * (Q_UNIT * sum4(second)));
#else
    precise float result = fma(w.scale.x, sum4(first), w.scale.z * sum4(second));
#endif
#ifdef HAS_MIN
    result -= fma(w.scale.y, a.sums.x, w.scale.w * a.sums.y);
#endif
    return result;
}

vec2 activation_sums(vec4 x[8]) {
#ifdef HAS_MIN
    precise vec4 a = (x[0] + x[1]) + (x[2] + x[3]);
    precise vec4 b = (x[4] + x[5]) + (x[6] + x[7]);
    return vec2(sum4(a), sum4(b));
#else
    return vec2(0.0);
#endif
}

Activations load_activations(uint slot, uint column, uint block, uint t) {
    Activations a;
    const uint first = chunk_x(block, t);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        a.x[i] = activation4(slot, column, first + i);
        a.x[i + 4u] = activation4(slot, column, first + GROUP_B_OFFSET + i);
    }
    a.sums = activation_sums(a.x);
    return a;
}

// A sum with what a chunk adds to it.
float add_chunk(float sum, float weight, Unpacked chunk, Activations a) {
    precise float result = fma(weight, chunk_dot(chunk, a), sum);
    return result;
}

void prepare_dots() {
#ifdef HAS_CODE_BOOK
    fill_code_book();
#endif
}

// A block of the flattened [slot][block], and how far a lane goes from step to step: there is no division in the loop.
struct BlockPlace {
    uint slot;
    uint block;
};

BlockPlace block_place(uint flat_block, uint n_slots, uint n_blocks) {
    return n_slots == 1u ? BlockPlace(0u, flat_block) : BlockPlace(flat_block / n_blocks, flat_block % n_blocks);
}

bool is_inside(BlockPlace place, uint n_slots, uint n_blocks) {
    return n_slots == 1u ? place.block < n_blocks : place.slot < n_slots;
}

BlockPlace next_place(BlockPlace place, BlockPlace stride, uint n_slots, uint n_blocks) {
    const uint block = place.block + stride.block;
    if (n_slots == 1u) return BlockPlace(0u, block);
    const bool wraps = block >= n_blocks;
    return BlockPlace(place.slot + stride.slot + uint(wraps), wraps ? block - n_blocks : block);
}

#ifdef BLOCK_PER_LANE

#include "block_parts.glsl"

void add_block(BlockPlace place, uint n_blocks, inout float dots[N_PRODUCTS]) {
    const float weight = slot_weight(place.slot);
    const WeightRow matrix = slot_matrix(place.slot);
    BlockRow rows[N_DOTS];
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
        rows[r].row = dot_row(matrix, r);
        load_block_row(n_blocks, place.block, rows[r]);
    }
    [[dont_unroll]] for (uint t = 0u; t < BLOCK_CHUNKS; ++t) {
        Activations of_column[COLUMNS];
        [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) of_column[c] = load_activations(place.slot, c, place.block, t);
        [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
            next_chunk(n_blocks, place.block, t, rows[r]);
            const Unpacked chunk = unpacked(rows[r].chunk, place.block, t);
            [[unroll]] for (uint c = 0u; c < COLUMNS; ++c)
                dots[c * N_DOTS + r] = add_chunk(dots[c * N_DOTS + r], weight, chunk, of_column[c]);
        }
    }
}

void dot_rows(uint n_slots, uint n_blocks, out float dots[N_PRODUCTS]) {
    [[unroll]] for (uint i = 0u; i < N_PRODUCTS; ++i) dots[i] = 0.0;
    const BlockPlace stride = block_place(gl_WorkGroupSize.x, n_slots, n_blocks);
    BlockPlace place = block_place(gl_LocalInvocationIndex, n_slots, n_blocks);
    for (; is_inside(place, n_slots, n_blocks); place = next_place(place, stride, n_slots, n_blocks))
        add_block(place, n_blocks, dots);
}

#else

// Rows whose words a lane has in registers at once.
const uint WORDS4 = OWN_WORDS4 + (COMMON_WORDS4 > 0 ? 1u : 0u) + (PART_WORDS4 > 0 ? 1u : 0u);
const uint CHUNK_WORDS4 = WORDS4 + (SINGLE_WORDS > 0 ? 1u : 0u);
const uint MOST_ROWS = LOADED_WORDS < CHUNK_WORDS4 ? 1u : LOADED_WORDS / CHUNK_WORDS4;
const uint LOADED_ROWS = N_DOTS < MOST_ROWS ? N_DOTS : MOST_ROWS;

// What a lane must know of a slot before it can load anything else.
struct SlotInput {
    WeightRow matrix;
    float weight;
};

SlotInput load_slot(BlockPlace place, uint n_slots) {
    const uint slot = min(place.slot, n_slots - 1u);
    return SlotInput(slot_matrix(slot), slot_weight(slot));
}

void add_chunks(BlockPlace place, SlotInput slot, uint n_blocks, uint t, inout float dots[N_PRODUCTS]) {
    Activations a;
    [[unroll]] for (uint first = 0u; first < N_DOTS; first += LOADED_ROWS) {
        WeightChunk chunks[LOADED_ROWS];
        Unpacked numbers[LOADED_ROWS];
        [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
            if (first + i < N_DOTS) load_chunk(dot_row(slot.matrix, first + i), n_blocks, place.block, t, chunks[i]);
        }
        [[unroll]] for (uint c = 0u; c < COLUMNS; ++c) {
            if (COLUMNS > 1u || first == 0u) a = load_activations(place.slot, c, place.block, t);
#ifdef KEEP
            [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
                if (first + i < N_DOTS) keep_chunk(dot_row(slot.matrix, first + i), n_blocks, place.block, t, chunks[i]);
            }
#endif
            [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
                if (first + i < N_DOTS) {
                    if (c == 0u) numbers[i] = unpacked(chunks[i], place.block, t);
                    const uint at = c * N_DOTS + first + i;
                    dots[at] = add_chunk(dots[at], slot.weight, numbers[i], a);
                }
            }
        }
    }
}

void dot_rows(uint n_slots, uint n_blocks, out float dots[N_PRODUCTS]) {
    [[unroll]] for (uint i = 0u; i < N_PRODUCTS; ++i) dots[i] = 0.0;
    const uint t = gl_LocalInvocationIndex % BLOCK_CHUNKS;
    const BlockPlace stride = block_place(gl_WorkGroupSize.x / BLOCK_CHUNKS, n_slots, n_blocks);
    BlockPlace place = block_place(gl_LocalInvocationIndex / BLOCK_CHUNKS, n_slots, n_blocks);
    SlotInput slot = load_slot(place, n_slots);
    while (is_inside(place, n_slots, n_blocks)) {
        const BlockPlace next = next_place(place, stride, n_slots, n_blocks);
        const SlotInput next_slot = load_slot(next, n_slots); // on its way beside this step's weights
        add_chunks(place, slot, n_blocks, t, dots);
        place = next;
        slot = next_slot;
    }
}
#endif
