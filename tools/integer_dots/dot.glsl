// Takes the place of shaders/include/dot.glsl: the same rows and loads, with activations of 8 bits and packed integer dots.
// Activations are three 16-byte words a block of 32: 32 numbers of 8 bits, then scale, and scale * (sum of each 16 numbers).
// weight = scale * number - min: types whose numbers are stored with an offset have it in min.
#extension GL_EXT_spirv_intrinsics : require
#include "weights.glsl"

// OpSDotKHR of 4x8 bits packed in words: glslang 13 has no name for it.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int packed_dot(int a, int b, spirv_literal int packed_format);

const uint N_PRODUCTS = COLUMNS * N_DOTS;

const uint WORDS4 = OWN_WORDS4 + (COMMON_WORDS4 > 0 ? 1u : 0u) + (PART_WORDS4 > 0 ? 1u : 0u);
const uint CHUNK_WORDS4 = WORDS4 + (SINGLE_WORDS > 0 ? 1u : 0u);
const uint MOST_ROWS = LOADED_WORDS < CHUNK_WORDS4 ? 1u : LOADED_WORDS / CHUNK_WORDS4;
const uint LOADED_ROWS = N_DOTS < MOST_ROWS ? N_DOTS : MOST_ROWS;

// Four numbers of a chunk, below 128; i is 0..3 in the first 16 weights, 4..7 in the others.
uint packed_numbers(WeightChunk chunk, uint t, uint i) {
    const uint word = i & 3u;
#if defined(TYPE_Q4_K) || defined(TYPE_Q4_0)
    return (chunk.own[0][word] >> (i < 4u ? 0u : 4u)) & 0x0F0F0F0Fu;
#elif defined(TYPE_Q8_0)
    return chunk.own[i >> 2u][word];
#elif defined(TYPE_Q6_K)
    const uint low = chunk.own[0][word] >> (i < 4u ? 0u : 4u), high = chunk.part[word] >> ((t & 2u) + (i < 4u ? 0u : 4u));
    return (low & 0x0F0F0F0Fu) | ((high & 0x03030303u) << 4u);
#elif defined(TYPE_Q2_K)
    return (chunk.part[word] >> ((t & 1u) * 4u + (i < 4u ? 0u : 2u))) & 0x03030303u;
#elif defined(TYPE_Q3_K)
    const uint shift = (t & 1u) * 2u;
    const uint low = chunk.part[word] >> (2u * shift), high = chunk.common_word[word] >> ((t & 4u) + shift);
    return i < 4u ? (low & 0x03030303u) | ((high & 0x01010101u) << 2u) : ((low >> 2u) & 0x03030303u) | ((high << 1u) & 0x04040404u);
#endif
}

#if defined(TYPE_Q6_K)
const float OFFSET = 32.0;
#elif defined(TYPE_Q4_0)
const float OFFSET = 8.0;
#elif defined(TYPE_Q3_K)
const float OFFSET = 4.0;
#else
const float OFFSET = 0.0;
#endif

struct Activations {
    ivec4 x[2];   // of the two groups
    vec2 scales;
    vec2 sums;
};

Activations load_activations(uint block, uint t) {
    Activations a;
    const uint first = chunk_x(block, t), second = first + GROUP_B_OFFSET; // in vec4 of weights
    const uint first_block = first / 8u, second_block = second / 8u;
    a.x[0] = floatBitsToInt(activation4(0u, 0u, first_block * 3u + (first / 4u) % 2u));
    a.x[1] = floatBitsToInt(activation4(0u, 0u, second_block * 3u + (second / 4u) % 2u));
    const vec4 head = activation4(0u, 0u, first_block * 3u + 2u), other = activation4(0u, 0u, second_block * 3u + 2u);
    a.scales = vec2(head.x, other.x);
    a.sums = vec2((first / 4u) % 2u == 0u ? head.y : head.z, (second / 4u) % 2u == 0u ? other.y : other.z);
    return a;
}

float chunk_dot(WeightChunk chunk, uint block, uint t, Activations a) {
    vec4 numbers[8];
    vec4 scale;
    unpack_chunk(chunk, block, t, numbers, scale); // the compiler drops the numbers
    int dots[2] = int[2](0, 0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i)
        dots[i >> 2u] += packed_dot(int(packed_numbers(chunk, t, i)), a.x[i >> 2u][i & 3u], 0);
#ifdef HAS_MIN
    const float least = fma(scale.y, a.sums.x, scale.w * a.sums.y);
#else
    const float least = OFFSET * fma(scale.x, a.sums.x, scale.z * a.sums.y);
#endif
    const bool one_block = BLOCK_CHUNKS == 1u; // then both groups share their scales
    const float first = one_block ? -least : fma(scale.z * a.scales.y, float(dots[1]), -least);
    precise float result = fma(scale.x * a.scales.x, float(one_block ? dots[0] + dots[1] : dots[0]), first);
    return result;
}

void prepare_dots() {}

// Of a plain matrix and one vector: what the study compares.
void dot_rows(uint n_slots, uint n_blocks, out float dots[N_PRODUCTS]) {
    [[unroll]] for (uint i = 0u; i < N_PRODUCTS; ++i) dots[i] = 0.0;
    const uint t = gl_LocalInvocationIndex % BLOCK_CHUNKS;
    const WeightRow matrix = slot_matrix(0u);
    for (uint block = gl_LocalInvocationIndex / BLOCK_CHUNKS; block < n_blocks; block += gl_WorkGroupSize.x / BLOCK_CHUNKS) {
        Activations a;
        [[unroll]] for (uint first = 0u; first < N_DOTS; first += LOADED_ROWS) {
            WeightChunk chunks[LOADED_ROWS];
            [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
                if (first + i < N_DOTS) load_chunk(dot_row(matrix, first + i), n_blocks, block, t, chunks[i]);
            }
            if (first == 0u) a = load_activations(block, t);
            [[unroll]] for (uint i = 0u; i < LOADED_ROWS; ++i) {
                if (first + i < N_DOTS) dots[first + i] += chunk_dot(chunks[i], block, t, a);
            }
        }
    }
}
