// What tile_shared.glsl multiplies with HALF_TILES: f16, two neighbours a word, so that an instruction has two products. A chunk
// of a row, and of a column, is first multiplied by a power of two that brings its largest number to 16 or more, below 32: no
// sum can overflow, and what is too small for f16 is below 2^-18 of the largest. A chunk's products are added up in f16, even
// ones and odd ones apart; chunks in f32. vkmoe/kernels/matmul/twins.py bounds the error.
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require

#define Slice uvec4
#define Run f16vec2
#define OVER_SLICES [[unroll]]  // NVK takes pairs of f16 apart, and joins them, between rounds of a loop

shared float w_units[TILE_DOTS];                     // what a chunk was divided by
shared float x_units[TILE_COLUMNS];
shared float x_peaks[TILE_COLUMNS * CHUNK_SLICES];  // [column][slice] of the next step: the largest magnitude

uint two_halves(vec2 numbers) { return packFloat2x16(f16vec2(numbers)); }

Slice slice_of(vec4 first, vec4 last) {
    return uvec4(two_halves(first.xy), two_halves(first.zw), two_halves(last.xy), two_halves(last.zw));
}

Run begin_run(float sum) { return f16vec2(0.0); }

Run add_products(Slice w, Slice x, uint k, Run run) {
    precise f16vec2 sum = fma(unpackFloat2x16(w[k]), unpackFloat2x16(x[k]), run);
    return sum;
}

float end_run(Run run, float sum, uint dot, uint column) {
    precise float16_t of_chunk = run.x + run.y;
    precise float ended = fma(float(of_chunk), w_units[dot] * x_units[column], sum);
    return ended;
}

float peak_of(vec4 numbers) {
    const vec4 sizes = abs(numbers);
    return max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
}

// The power of two that a chunk is divided by, and its inverse. Exponents of both stay those of normal numbers.
float unit_of(float peak, out float inverse) {
    const uint exponent = max(floatBitsToUint(peak) >> 23u, 5u);
    inverse = uintBitsToFloat((258u - exponent) << 23u);
    return uintBitsToFloat((exponent - 4u) << 23u);
}

void scale_weights(inout vec4 w[CHUNK_VEC4S]) {
    float peak = peak_of(w[0]), inverse;
    [[unroll]] for (uint i = 1u; i < CHUNK_VEC4S; ++i) peak = max(peak, peak_of(w[i]));
    w_units[gl_LocalInvocationIndex] = unit_of(peak, inverse);
    [[unroll]] for (uint i = 0u; i < CHUNK_VEC4S; ++i) w[i] *= inverse;
}

// Several lanes bring a column's chunk: before the barrier each says how large its part is, behind it all find the largest.
void note_peaks(vec4 x[LANE_X]) {
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        const uint at = gl_LocalInvocationIndex + i * TILE_DOTS & (TILE_COLUMNS * CHUNK_SLICES - 1u);
        x_peaks[at] = max(peak_of(x[2u * i]), peak_of(x[2u * i + 1u]));
    }
}

void scale_x(inout vec4 x[LANE_X]) {
    [[unroll]] for (uint i = 0u; i < LANE_SLICES; ++i) {
        const uint column = (gl_LocalInvocationIndex + i * TILE_DOTS) / CHUNK_SLICES & (TILE_COLUMNS - 1u);
        float peak = 0.0, inverse;
        [[unroll]] for (uint k = 0u; k < CHUNK_SLICES; ++k) peak = max(peak, x_peaks[column * CHUNK_SLICES + k]);
        x_units[column] = unit_of(peak, inverse);
        x[2u * i] *= inverse;
        x[2u * i + 1u] *= inverse;
    }
}
