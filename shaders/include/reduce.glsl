// Sums over a workgroup in a fixed order. Works for any workgroup size up to 256 and any subgroup size.
// Needs: local_size_x_id = 0 declared as `layout(local_size_x_id = 0) in;`. With USE_SUBGROUP: subgroup arithmetic.
// Every invocation of the workgroup must call these (they contain barriers). The result is valid in all invocations.
// ONE_SUBGROUP: the host promises that a workgroup is one subgroup; then no barrier is needed, which on CPU drivers costs
// more than the sum (they suspend every invocation). A broken promise gives NaN, not a wrong sum.
#ifdef ONE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

float workgroup_sum(float value) {
    return gl_NumSubgroups == 1u ? subgroupAdd(value) : uintBitsToFloat(0x7FC00000u);
}

float workgroup_max(float value) {
    return gl_NumSubgroups == 1u ? subgroupMax(value) : uintBitsToFloat(0x7FC00000u);
}
#elif defined(USE_SUBGROUP)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

// Worst case of one value per subgroup: subgroups of 1 in a workgroup of 256.
shared float reduce_scratch[256];

float workgroup_sum(float value) {
    const float partial = subgroupAdd(value);
    barrier();
    if (subgroupElect()) reduce_scratch[gl_SubgroupID] = partial;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < gl_NumSubgroups; ++i) total += reduce_scratch[i];
    return total;
}

float workgroup_max(float value) {
    const float partial = subgroupMax(value);
    barrier();
    if (subgroupElect()) reduce_scratch[gl_SubgroupID] = partial;
    barrier();
    float best = reduce_scratch[0];
    for (uint i = 1u; i < gl_NumSubgroups; ++i) best = max(best, reduce_scratch[i]);
    return best;
}
#else
shared float reduce_scratch[256];

// A tree over the next power of two, so that workgroup sizes need not be powers of two.
float workgroup_sum(float value) {
    const uint lane = gl_LocalInvocationIndex;
    const uint size = gl_WorkGroupSize.x;
    barrier();
    reduce_scratch[lane] = value;
    barrier();
    for (uint stride = 128u; stride > 0u; stride >>= 1u) {
        if (stride < size) {
            if (lane < stride && lane + stride < size) reduce_scratch[lane] += reduce_scratch[lane + stride];
            barrier();
        }
    }
    return reduce_scratch[0];
}

float workgroup_max(float value) {
    const uint lane = gl_LocalInvocationIndex;
    const uint size = gl_WorkGroupSize.x;
    barrier();
    reduce_scratch[lane] = value;
    barrier();
    for (uint stride = 128u; stride > 0u; stride >>= 1u) {
        if (stride < size) {
            if (lane < stride && lane + stride < size) reduce_scratch[lane] = max(reduce_scratch[lane], reduce_scratch[lane + stride]);
            barrier();
        }
    }
    return reduce_scratch[0];
}
#endif
