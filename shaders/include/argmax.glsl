// The largest (key, lower index wins) over a workgroup. Works for any workgroup size up to 256 and any subgroup size.
// Needs: `layout(local_size_x_id = 0) in;`. With USE_SUBGROUP: subgroup arithmetic.
// Every invocation must call it (it contains barriers); the result is valid in all invocations.
#ifdef USE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif

shared uint argmax_keys[gl_WorkGroupSize.x];
shared uint argmax_indices[gl_WorkGroupSize.x];

bool argmax_beats(uint key_a, uint index_a, uint key_b, uint index_b) {
    return key_a > key_b || (key_a == key_b && index_a < index_b);
}

// Keeps the better of two entries in the first.
void argmax_join(uint into, uint other) {
    if (argmax_beats(argmax_keys[other], argmax_indices[other], argmax_keys[into], argmax_indices[into])) {
        argmax_keys[into] = argmax_keys[other];
        argmax_indices[into] = argmax_indices[other];
    }
}

// (key, index) of the winner.
uvec2 workgroup_argmax(uint key, uint index) {
#ifdef USE_SUBGROUP
    const uint top_key = subgroupMax(key);
    const uint top_index = subgroupMin(key == top_key ? index : 0xFFFFFFFFu);
    barrier();
    if (subgroupElect()) {
        argmax_keys[gl_SubgroupID] = top_key;
        argmax_indices[gl_SubgroupID] = top_index;
    }
    barrier();
    uvec2 best = uvec2(argmax_keys[0], argmax_indices[0]);
    for (uint i = 1u; i < gl_NumSubgroups; ++i) {
        if (argmax_beats(argmax_keys[i], argmax_indices[i], best.x, best.y)) best = uvec2(argmax_keys[i], argmax_indices[i]);
    }
    return best;
#else
    const uint lane = gl_LocalInvocationIndex;
    const uint size = gl_WorkGroupSize.x;
    barrier();
    argmax_keys[lane] = key;
    argmax_indices[lane] = index;
    barrier();
    for (uint stride = 128u; stride > 0u; stride >>= 1u) {
        if (stride < size) {
            if (lane < stride && lane + stride < size) argmax_join(lane, lane + stride);
            barrier();
        }
    }
    return uvec2(argmax_keys[0], argmax_indices[0]);
#endif
}
