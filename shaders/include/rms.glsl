// The scale of a fused RMSNorm: 1 / sqrt(mean(h^2) + eps), from the partial sums of h^2 that the producer of h left behind.
// (Zhang & Sennrich 2019, eq. 4; the gain is already in the activations.) Needs: reduce.glsl; the
// array `norm_partials`. Every invocation must call it.
float fused_rms_scale(uint n_partials, float inverse_width, float eps) {
    if (n_partials == 0u) return 1.0;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationIndex; i < n_partials; i += gl_WorkGroupSize.x) sum += norm_partials[i];
    sum = workgroup_sum(sum);
    precise float scale = 1.0 / sqrt(sum * inverse_width + eps);
    return scale;
}
