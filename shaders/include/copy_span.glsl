// Copies this workgroup's part of n_units units of 16 bytes: GROUP_UNITS of them, counted in lines
// (x, y of the dispatch). A lane loads UNITS of them, one workgroup size apart, before it stores any: many loads are in flight
// and neighbouring lanes take neighbouring units. A workgroup behind the span's end copies nothing.
// Needs: address.glsl, store.glsl, `layout(local_size_x_id = 0) in;`; dispatch (ceil(n_groups / n_lines), n_lines, ...), n_groups
// being ceil(n_units / GROUP_UNITS).
const uint UNITS = 8u;

uint first_unit() {
    return (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * gl_WorkGroupSize.x * UNITS;
}

void copy_span(uvec2 source, uvec2 target, uint n_units) {
    const uint group = first_unit(), first = group + gl_LocalInvocationIndex, stride = gl_WorkGroupSize.x;
    if (group + UNITS * stride <= n_units) {
        uvec4 words[UNITS];
        [[unroll]] for (uint i = 0u; i < UNITS; ++i) words[i] = load_words4(address_add(source, (first + i * stride) * 16u));
        [[unroll]] for (uint i = 0u; i < UNITS; ++i) store_words4(address_add(target, (first + i * stride) * 16u), words[i]);
    } else {
        for (uint unit = first; unit < n_units; unit += stride)
            store_words4(address_add(target, unit * 16u), load_words4(address_add(source, unit * 16u)));
    }
}
