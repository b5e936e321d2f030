// Dot products of N_DOTS weight rows with activations, summed over n_slots (one for a plain matrix, the used experts for
// the down projection). Two mappings of the same sum:
//   default         lanes share a block: chunk i of the flattened [slot][block][chunk] goes to lane i % workgroup size; the
//                   staged words of a block are loaded once into shared memory. Coalesced: for real GPUs.
//   BLOCK_PER_LANE  a lane takes whole blocks, its staged words in registers. For CPU drivers, where a load costs the same
//                   whatever its address: activations are loaded once for all rows, headers once a block.
// Needs: address.glsl, weight_row.glsl, reduce.glsl, a TYPE_ define, N_DOTS (constant), and from the op
//   WeightRow dot_row(uint r, uint slot)         row r of this workgroup (or lane) in the slot's matrix
//   vec4 activation4(uint slot, uint index4)     four activations
//   float slot_weight(uint slot)                 what the slot's dot product is multiplied by
// Gives dot_rows(n_slots, n_blocks), then dot_total(r), valid in every lane.
// Every invocation must call dot_rows (it contains barriers).

uvec4 staged_word4(uint r, uint i);
#ifndef BLOCK_PER_LANE
#define SHARED_CODE_BOOK
#endif
#include "weights.glsl"

// Array sizes must not be zero.
#ifdef HAS_STAGED
#define STAGED_ARRAY STAGED_WORDS4
#else
#define STAGED_ARRAY 1u
#endif

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

#ifdef ONE_SUBGROUP
float dot_totals[N_DOTS];

float dot_total(uint r) {
    float total = dot_totals[0];
    [[unroll]] for (uint i = 1u; i < N_DOTS; ++i) total = r == i ? dot_totals[i] : total;
    return total;
}

void reduce_dots(float sums[N_DOTS]) {
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) dot_totals[r] = workgroup_sum(sums[r]);
}
#else
shared float dot_scratch[N_DOTS * gl_WorkGroupSize.x];

#ifdef USE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

float dot_total(uint r) {
    float total = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; ++i) total += dot_scratch[r * gl_WorkGroupSize.x + i];
    return total;
}

void reduce_dots(float sums[N_DOTS]) {
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
        const float partial = subgroupAdd(sums[r]);
        if (subgroupElect()) dot_scratch[r * gl_WorkGroupSize.x + gl_SubgroupID] = partial;
    }
    barrier();
}
#else
float dot_total(uint r) { return dot_scratch[r * gl_WorkGroupSize.x]; }

void reduce_dots(float sums[N_DOTS]) {
    const uint lane = gl_LocalInvocationIndex;
    const uint size = gl_WorkGroupSize.x;
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) dot_scratch[r * size + lane] = sums[r];
    barrier();
    for (uint stride = 128u; stride > 0u; stride >>= 1u) {
        if (stride < size) {
            if (lane < stride && lane + stride < size) {
                [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) dot_scratch[r * size + lane] += dot_scratch[r * size + lane + stride];
            }
            barrier();
        }
    }
}
#endif
#endif

#ifdef BLOCK_PER_LANE

uvec4 staged_local[N_DOTS * STAGED_ARRAY];

uvec4 staged_word4(uint r, uint i) { return staged_local[r * STAGED_WORDS4 + i]; }

void dot_rows(uint n_slots, uint n_blocks) {
    precise float sums[N_DOTS];
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) sums[r] = 0.0;
    for (uint flat_block = gl_LocalInvocationIndex; flat_block < n_slots * n_blocks; flat_block += gl_WorkGroupSize.x) {
        const uint slot = flat_block / n_blocks;
        const uint block = flat_block % n_blocks;
        const float weight = slot_weight(slot);
        WeightRow rows[N_DOTS];
        [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
            rows[r] = dot_row(r, slot);
            [[unroll]] for (uint i = 0u; i < STAGED_WORDS4; ++i)
                staged_local[r * STAGED_WORDS4 + i] = load_staged(rows[r], n_blocks, block, i);
        }
        [[dont_unroll]] for (uint t = 0u; t < BLOCK_CHUNKS; ++t) {
            vec4 x[8];
            load_activations(slot, block, t, x);
            const vec2 x_sums = activation_sums(x);
            [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
                vec4 q[8];
                vec4 scale;
                unpack_chunk(rows[r], n_blocks, block, t, r, q, scale);
                sums[r] = fma(weight, chunk_dot(q, scale, x, x_sums), sums[r]);
            }
        }
    }
    reduce_dots(sums);
}

#else

#ifdef HAS_STAGED
shared uvec4 staged_shared[N_DOTS * (gl_WorkGroupSize.x / BLOCK_CHUNKS) * STAGED_WORDS4];
#else
uvec4 staged_shared[1];
#endif
uvec4 staged_word4(uint r, uint i) {
    const uint tile_blocks = gl_WorkGroupSize.x / BLOCK_CHUNKS;
    const uint block_in_tile = gl_LocalInvocationIndex / BLOCK_CHUNKS;
    return staged_shared[(r * tile_blocks + block_in_tile) * STAGED_WORDS4 + i];
}

#ifdef HAS_STAGED
// Loads the staged words of the blocks that lanes [0, workgroup size) are about to use, each once.
void stage_tile(uint first_block, uint n_slots, uint n_blocks) {
    const uint tile_blocks = gl_WorkGroupSize.x / BLOCK_CHUNKS;
    const uint n_words = N_DOTS * tile_blocks * STAGED_WORDS4;
    for (uint item = gl_LocalInvocationIndex; item < n_words; item += gl_WorkGroupSize.x) {
        const uint r = item / (tile_blocks * STAGED_WORDS4);
        const uint in_row = item % (tile_blocks * STAGED_WORDS4);
        const uint flat_block = first_block + in_row / STAGED_ARRAY;
        if (flat_block < n_slots * n_blocks) {
            staged_shared[item] = load_staged(dot_row(r, flat_block / n_blocks), n_blocks, flat_block % n_blocks,
                                              in_row % STAGED_ARRAY);
        }
    }
    barrier();
}
#endif

void dot_rows(uint n_slots, uint n_blocks) {
    const uint tile_blocks = gl_WorkGroupSize.x / BLOCK_CHUNKS;
    const uint n_flat_blocks = n_slots * n_blocks;
    const uint block_in_tile = gl_LocalInvocationIndex / BLOCK_CHUNKS;
    const uint t = gl_LocalInvocationIndex % BLOCK_CHUNKS;
#ifdef HAS_CODE_BOOK
    fill_code_book();
#endif
    precise float sums[N_DOTS];
    [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) sums[r] = 0.0;
    for (uint first_block = 0u; first_block < n_flat_blocks; first_block += tile_blocks) {
#ifdef HAS_STAGED
        stage_tile(first_block, n_slots, n_blocks);
#endif
        const uint flat_block = first_block + block_in_tile;
        if (flat_block < n_flat_blocks) {
            const uint slot = flat_block / n_blocks;
            const uint block = flat_block % n_blocks;
            const float weight = slot_weight(slot);
            vec4 x[8];
            load_activations(slot, block, t, x);
            const vec2 x_sums = activation_sums(x);
            [[unroll]] for (uint r = 0u; r < N_DOTS; ++r) {
                vec4 q[8];
                vec4 scale;
                unpack_chunk(dot_row(r, slot), n_blocks, block, t, r, q, scale);
                sums[r] = fma(weight, chunk_dot(q, scale, x, x_sums), sums[r]);
            }
        }
#ifdef HAS_STAGED
        barrier();
#endif
    }
    reduce_dots(sums);
}
#endif
