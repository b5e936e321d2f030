// Reading rows of the caches in attention.comp and latent_attention.comp, and appending this token's own to them.
// Needs: kv_types.glsl, attention_state.glsl, params.glsl, the push constant `mode`; N_CACHES, that a row is appended to, and
// own_dim(cache, kv_head, d): one dim of this token's row of one of them.

// What a dispatch does, as kernels/attention/operations.py numbers it; the caches are the same after each way.
const uint WHOLE = 0u, APPEND = 1u, READ = 2u;

// Where the region of this row's sequence begins.
uvec2 region_start(uint type, uvec2 cache) { return region_address(type, cache, params.rows[ROW].sequence); }

// The unit `j` of this lane, or the row's last.
uint lane_unit(uint j) {
    const uint unit = team_lane + j * TEAM_LANES;
    return UNITS % TEAM_LANES == 0u ? unit : min(unit, UNITS - 1u);
}

// Whether this workgroup makes the row of its own position, and then takes it from shared memory.
bool appends(uint end, uint position) { return mode == APPEND || (mode == WHOLE && end == position + 1u); }

// The positions of a split whose rows were there before this dispatch: its own row is being written, maybe by another
// workgroup. The first token has no other row; what it reads there is not used.
uint filled_end(uint end, uint position) { return mode == READ ? end : min(end, max(position, 1u)); }

// Loads this lane's units of the step's positions. No branch keeps a load waiting: beyond the end the last position is read
// again, and beyond the row its last unit; weights and queries are zeros there. TAKE_OWN puts this token's row in its place.
#define LOAD_STEP(type, region, kv_head, first, end, raw) \
    [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) { \
        const uint row = cached_row(kv_head, min(first + i, end - 1u)); \
        [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) { \
            [[unroll]] for (uint word = 0u; word < UNIT_RAW; ++word) { \
                if (word < raw_words(type)) \
                    raw[(i * LANE_UNITS + j) * UNIT_RAW + word] = load_raw(type, region, row, lane_unit(j), word); \
            } \
        } \
    }

// This token's row comes from shared memory: what was just stored by address is never read back.
#define TAKE_OWN(cache, first, end, position, raw) \
    if (mode == WHOLE && end > position) { \
        [[unroll]] for (uint i = 0u; i < STEP_POSITIONS; ++i) { \
            if (first + i >= position) { \
                [[unroll]] for (uint j = 0u; j < LANE_UNITS; ++j) { \
                    [[unroll]] for (uint word = 0u; word < UNIT_RAW; ++word) { \
                        raw[(i * LANE_UNITS + j) * UNIT_RAW + word] = own_rows[(cache * UNITS + lane_unit(j)) * UNIT_RAW + word]; \
                    } \
                } \
            } \
        } \
    }

// ----- this token's rows -----

shared uvec4 own_rows[N_CACHES * UNITS * UNIT_RAW]; // exactly as they are loaded from the caches

uint cache_type(uint cache) { return cache == 0u ? K_TYPE : V_TYPE; }

// Where a word of a row lies in own_rows.
uint own_raw(uint cache, uint word) {
    const uint type = cache_type(cache), unit_words = unit_bytes(type) / 4u;
    if (UNIT_RAW * 4u == unit_words) return cache * UNITS * UNIT_RAW + word / 4u;
    return (cache * UNITS + word / unit_words) * UNIT_RAW + (type == F32 ? word / 4u % 2u : 0u);
}

uint own_scale(uint cache, uint block) {
    return block < N_BLOCKS ? own_rows[(cache * UNITS + block * BLOCK_UNITS) * UNIT_RAW].z : 0u;
}

// Leaves the scales of a q8_0 row beside the places of its quants. Every invocation must call it.
void find_own_scales(uint cache, uint kv_head) {
    for (uint block = lane; block < N_BLOCKS; block += WORKGROUP_LANES) {
        const uint first = block * BLOCK_DIMS, end = min(first + BLOCK_DIMS, CACHED_DIM);
        uint largest = 0u;
        for (uint d = first; d < end; ++d) largest = max(largest, magnitude_bits(own_dim(cache, kv_head, d)));
        const uint scale = block_scale(largest);
        for (uint unit = first / 8u; unit < end / 8u; ++unit) own_rows[(cache * UNITS + unit) * UNIT_RAW].z = scale;
    }
    barrier();
}

// A word of this token's row, as the cache holds it.
uint own_word(uint cache, uint kv_head, uint word) {
    const uint type = cache_type(cache);
    vec4 values = vec4(0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        if (i < word_dims(type)) values[i] = own_dim(cache, kv_head, word * word_dims(type) + i);
    }
    return encode(type, values, type == Q8_0 ? own_scale(cache, word / (BLOCK_DIMS / 4u)) : 0u);
}

void keep_own_word(uint cache, uint word, uint bits) {
    own_rows[own_raw(cache, word)][cache_type(cache) == Q8_0 ? word % 2u : word % 4u] = bits;
}

// Appends the scales of a q8_0 row.
void append_own_scales(uint cache, uvec2 region, uint kv_head, uint position) {
    for (uint word = lane; word < SCALE_WORDS; word += WORKGROUP_LANES) {
        const uint bits = own_scale(cache, 2u * word) | own_scale(cache, 2u * word + 1u) << 16u;
        store_scale_word(region, cached_row(kv_head, position), word, bits);
    }
}

// Keeps this token's rows in shared memory for this workgroup and, if `writes`, appends them to their regions. Every invocation
// must call it, once own_dim knows the rows.
void append_position(uvec2 keys_at, uvec2 values_at, uint kv_head, uint position, bool writes) {
    const bool has_values = N_CACHES == 2u;
    const uint row = cached_row(kv_head, position);
    if (K_TYPE == Q8_0) find_own_scales(KEYS, kv_head);
    if (has_values && V_TYPE == Q8_0) find_own_scales(VALUES, kv_head);
    const uint n_keys = row_words(K_TYPE), n_values = has_values ? row_words(V_TYPE) : 0u, n_words = max(n_keys, n_values);
    for (uint word = lane; word < n_words; word += WORKGROUP_LANES) {
        const bool takes_key = n_keys == n_words || word < n_keys;
        const bool takes_value = has_values && (n_values == n_words || word < n_values);
        const uint key = takes_key ? own_word(KEYS, kv_head, word) : 0u;
        const uint value = takes_value ? own_word(VALUES, kv_head, word) : 0u;
        if (takes_key) keep_own_word(KEYS, word, key);
        if (takes_value) keep_own_word(VALUES, word, value);
        if (writes && takes_key) store_row_word(K_TYPE, keys_at, row, word, key);
        if (writes && takes_value) store_row_word(V_TYPE, values_at, row, word, value);
    }
    if (writes && K_TYPE == Q8_0) append_own_scales(KEYS, keys_at, kv_head, position);
    if (writes && has_values && V_TYPE == Q8_0) append_own_scales(VALUES, values_at, kv_head, position);
    barrier();
}
