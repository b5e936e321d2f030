// Dot products of N_DOTS weight rows with activations, summed over n_slots (one for a plain matrix, the used experts for
// the down projection). Two mappings of the same sum:
//   default         lanes share a block: chunk i of the flattened [slot][block][chunk] goes to lane i % workgroup size. All
//                   that a lane needs of several rows is loaded before the first is unpacked. For real GPUs, whose caches
//                   serve words that neighbouring lanes share.
//   BLOCK_PER_LANE  a lane takes whole blocks, the words that its chunks share in registers. For CPU drivers, where a load
//                   costs the same whatever its address: activations are loaded once for all rows, headers once a block.
// Needs: address.glsl, weight_row.glsl, sums.glsl, a TYPE_ define, the constants N_DOTS and LOADED_WORDS (16-byte words
// that a lane loads before it unpacks the first, at least one row's), and from the op
//   WeightRow slot_matrix(uint slot)                   where the rows of a slot are counted from
//   WeightRow dot_row(WeightRow matrix, uint r)        row r of this workgroup in it
//   vec4 activation4(uint slot, uint index4)           four activations
//   float slot_weight(uint slot)                       what the slot's dot product is multiplied by
// Gives dot_rows(n_slots, n_blocks, sums): this lane's part of each.
#ifndef BLOCK_PER_LANE
#define SHARED_CODE_BOOK
#endif
#include "weights.glsl"

float sum4(vec4 v) {
    precise float sum = (v.x + v.y) + (v.z + v.w);
    return sum;
}

// The dot product of one chunk; x_sums: the sums of its two groups of activations, which min terms multiply.
// precise, here and wherever a weight's dot product is made: a driver that contracts or reorders could else do so in one
// variant of a kernel and not in another, and where an expert lies would change the answer.
float chunk_dot(vec4 q[8], vec4 scale, vec4 x[8], vec2 x_sums) {
    precise vec4 a = q[0] * x[0];
    precise vec4 b = q[4] * x[4];
    [[unroll]] for (uint i = 1u; i < 4u; ++i) {
        a = fma(q[i], x[i], a);
        b = fma(q[i + 4u], x[i + 4u], b);
    }
#ifdef Q_UNIT
    precise float result = fma(scale.x, Q_UNIT * sum4(a), scale.z * (Q_UNIT * sum4(b)));
#else
    precise float result = fma(scale.x, sum4(a), scale.z * sum4(b));
#endif
#ifdef HAS_MIN
    result -= fma(scale.y, x_sums.x, scale.w * x_sums.y);
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

void load_activations(uint slot, uint block, uint t, out vec4 x[8]) {
    const uint first = chunk_x(block, t);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        x[i] = activation4(slot, first + i);
        x[i + 4u] = activation4(slot, first + GROUP_B_OFFSET + i);
    }
}

// A sum with what a loaded chunk adds to it.
float add_chunk(float sum, float weight, WeightChunk chunk, uint block, uint t, vec4 x[8], vec2 x_sums) {
    vec4 q[8];
    vec4 scale;
    unpack_chunk(chunk, block, t, q, scale);
    precise float result = fma(weight, chunk_dot(q, scale, x, x_sums), sum);
    return result;
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

void add_block(BlockPlace place, uint n_blocks, inout float sums[N_SUMS]) {
    const float weight = slot_weight(place.slot);
    const WeightRow matrix = slot_matrix(place.slot);
    BlockRow rows[N_DOTS];
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
        rows[r].row = dot_row(matrix, r);
        load_block_row(n_blocks, place.block, rows[r]);
    }
    [[dont_unroll]] for (uint t = 0u; t < BLOCK_CHUNKS; ++t) {
        vec4 x[8];
        load_activations(place.slot, place.block, t, x);
        const vec2 x_sums = activation_sums(x);
        [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
            next_chunk(n_blocks, place.block, t, rows[r]);
            sums[r] = add_chunk(sums[r], weight, rows[r].chunk, place.block, t, x, x_sums);
        }
    }
}

void dot_rows(uint n_slots, uint n_blocks, out float sums[N_SUMS]) {
    [[unroll]] for (uint r = 0u; r < N_SUMS; ++r) sums[r] = 0.0;
    const BlockPlace stride = block_place(gl_WorkGroupSize.x, n_slots, n_blocks);
    BlockPlace place = block_place(gl_LocalInvocationIndex, n_slots, n_blocks);
    for (; is_inside(place, n_slots, n_blocks); place = next_place(place, stride, n_slots, n_blocks))
        add_block(place, n_blocks, sums);
}

#else

// Rows whose words a lane has in registers at once.
const uint WORDS4 = OWN_WORDS4 + COMMON_WORDS4 + (PART_WORDS4 > 0 ? 1u : 0u);
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

void add_chunks(BlockPlace place, SlotInput slot, uint n_blocks, uint t, inout float sums[N_SUMS]) {
    vec4 x[8];
    vec2 x_sums;
    [[unroll]] for (uint first = 0u; first < N_DOTS; first += LOADED_ROWS) {
        WeightChunk chunks[LOADED_ROWS];
        [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
            if (first + i < N_DOTS) load_chunk(dot_row(slot.matrix, first + i), n_blocks, place.block, t, chunks[i]);
        }
        if (first == 0u) {
            load_activations(place.slot, place.block, t, x);
            x_sums = activation_sums(x);
        }
#ifdef KEEP
        [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
            if (first + i < N_DOTS) keep_chunk(dot_row(slot.matrix, first + i), n_blocks, place.block, t, chunks[i]);
        }
#endif
        [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
            if (first + i < N_DOTS)
                sums[first + i] = add_chunk(sums[first + i], slot.weight, chunks[i], place.block, t, x, x_sums);
        }
    }
}

void dot_rows(uint n_slots, uint n_blocks, out float sums[N_SUMS]) {
    [[unroll]] for (uint r = 0u; r < N_SUMS; ++r) sums[r] = 0.0;
    const uint t = gl_LocalInvocationIndex % BLOCK_CHUNKS;
#ifdef HAS_CODE_BOOK
    fill_code_book();
#endif
    const BlockPlace stride = block_place(gl_WorkGroupSize.x / BLOCK_CHUNKS, n_slots, n_blocks);
    BlockPlace place = block_place(gl_LocalInvocationIndex / BLOCK_CHUNKS, n_slots, n_blocks);
    SlotInput slot = load_slot(place, n_slots);
    while (is_inside(place, n_slots, n_blocks)) {
        const BlockPlace next = next_place(place, stride, n_slots, n_blocks);
        const SlotInput next_slot = load_slot(next, n_slots); // on its way beside this step's weights
        add_chunks(place, slot, n_blocks, t, sums);
        place = next;
        slot = next_slot;
    }
}
#endif
