// The scale of a fused RMSNorm: 1 / sqrt(mean(h^2) + eps), from the partial sums of h^2 that the producer of h left behind.
// (Zhang & Sennrich 2019, eq. 4; the gain is already in the activations.) The loads come first, then other work, then the sum:
//   const NormPartials partials = load_norm_partials(first, n_partials);
//   ... norm_part(partials, first, n_partials), which the op adds up over its workgroup ...
//   rms_scale(total, n_partials, inverse_width, eps)
// `first` is the word at which a vector's partials begin.
// Needs: the array `norm_partials`.
const uint LOADED_PARTIALS = 8u;

struct NormPartials {
    float of_lane[LOADED_PARTIALS];
};

// The first of this lane's partials, all on their way at once.
NormPartials load_norm_partials(uint first, uint n_partials) {
    NormPartials loaded;
    [[unroll]] for (uint i = 0u; i < LOADED_PARTIALS; ++i) loaded.of_lane[i] = 0.0;
    if (n_partials == 0u) return loaded;
    [[unroll]] for (uint i = 0u; i < LOADED_PARTIALS; ++i) {
        const uint at = gl_LocalInvocationIndex + i * gl_WorkGroupSize.x;
        loaded.of_lane[i] = norm_partials[first + min(at, n_partials - 1u)];
    }
    return loaded;
}

// The sum of this lane's partials.
float norm_part(NormPartials loaded, uint first, uint n_partials) {
    precise float sum = 0.0;
    const uint size = gl_WorkGroupSize.x;
    [[unroll]] for (uint i = 0u; i < LOADED_PARTIALS; ++i) {
        if (gl_LocalInvocationIndex + i * size < n_partials) sum += loaded.of_lane[i];
    }
    for (uint i = gl_LocalInvocationIndex + LOADED_PARTIALS * size; i < n_partials; i += size) sum += norm_partials[first + i];
    return sum;
}

float rms_scale(float total, uint n_partials, float inverse_width, float eps) {
    if (n_partials == 0u) return 1.0;
    precise float scale = 1.0 / sqrt(total * inverse_width + eps);
    return scale;
}
