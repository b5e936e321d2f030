// N_SUMS sums over a workgroup at once, in a fixed order.
// Needs: reduce.glsl, N_SUMS (constant).
// Every invocation must call reduce_sums (it contains barriers). Gives sum_total(i), valid in all of them until they call
// sums_are_read, which must come before the next reduce_sums.
#ifdef ONE_SUBGROUP
void sums_are_read() {}

float sum_totals[N_SUMS];

float sum_total(uint r) {
    float total = sum_totals[0];
    [[unroll]] for (uint i = 1u; i < N_SUMS; ++i) total = r == i ? sum_totals[i] : total;
    return total;
}

void reduce_sums(float sums[N_SUMS]) {
    [[unroll]] for (uint r = 0u; r < N_SUMS; ++r) sum_totals[r] = workgroup_sum(sums[r]);
}
#else
void sums_are_read() { barrier(); }

shared float sum_scratch[N_SUMS * gl_WorkGroupSize.x];

#ifdef USE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

float sum_total(uint r) {
    float total = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; ++i) total += sum_scratch[r * gl_WorkGroupSize.x + i];
    return total;
}

void reduce_sums(float sums[N_SUMS]) {
    [[unroll]] for (uint r = 0u; r < N_SUMS; ++r) {
        const float partial = subgroupAdd(sums[r]);
        if (subgroupElect()) sum_scratch[r * gl_WorkGroupSize.x + gl_SubgroupID] = partial;
    }
    barrier();
}
#else
float sum_total(uint r) { return sum_scratch[r * gl_WorkGroupSize.x]; }

void reduce_sums(float sums[N_SUMS]) {
    const uint lane = gl_LocalInvocationIndex;
    const uint size = gl_WorkGroupSize.x;
    [[unroll]] for (uint r = 0u; r < N_SUMS; ++r) sum_scratch[r * size + lane] = sums[r];
    barrier();
    for (uint stride = 128u; stride > 0u; stride >>= 1u) {
        if (stride < size) {
            if (lane < stride && lane + stride < size) {
                [[unroll]] for (uint r = 0u; r < N_SUMS; ++r) sum_scratch[r * size + lane] += sum_scratch[r * size + lane + stride];
            }
            barrier();
        }
    }
}
#endif
#endif
