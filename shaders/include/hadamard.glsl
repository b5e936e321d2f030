// The Walsh-Hadamard matrix over the root of its size, which is its own inverse: what rows of caches are transformed by before they
// are rounded (vkmoe/kv_types.py). One step of it joins each two numbers whose places differ in one bit.
// Needs: GL_EXT_control_flow_attributes.
const float HADAMARD_FACTOR = 0.70710678118654752; // of a step: 1 / sqrt(2)

// Transforms the first numbers of a shared array in their place, `n` at a time, a power of two. Every invocation must call it, once
// the numbers are there. All lanes take part in a step: a lane with numbers of its own would have the banks of the others'.
#define TRANSFORM(array, n_numbers, n, own_lane, n_lanes) \
    [[dont_unroll]] for (uint step = 1u; step < n; step *= 2u) { \
        [[dont_unroll]] for (uint pair = own_lane; pair < (n_numbers) / 2u; pair += n_lanes) { \
            const uint at = pair + (pair & ~(step - 1u)); \
            const float one = array[at], other = array[at + step]; \
            array[at] = (one + other) * HADAMARD_FACTOR; \
            array[at + step] = (one - other) * HADAMARD_FACTOR; \
        } \
        barrier(); \
    }
