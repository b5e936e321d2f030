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

// The first unit of each block has what the block shares.
uint own_numbers(uint cache, uint block) {
    return block < N_BLOCKS ? own_rows[(cache * UNITS + block * BLOCK_UNITS) * UNIT_RAW].z : 0u;
}

// Leaves what the blocks of a row share beside the places of its quants. Every invocation must call it.
void find_own_numbers(uint cache, uint kv_head) {
    for (uint block = lane; block < N_BLOCKS; block += WORKGROUP_LANES) {
        const uint first = block * BLOCK_DIMS, end = min(first + BLOCK_DIMS, CACHED_DIM);
        Extremes found = NO_DIMS;
        for (uint d = first; d < end; ++d) found = joined(found, own_dim(cache, kv_head, d));
        const uint numbers = block_numbers(cache_type(cache), found);
        for (uint unit = first / 8u; unit < end / 8u; ++unit) own_rows[(cache * UNITS + unit) * UNIT_RAW].z = numbers;
    }
    barrier();
}

// A word of this token's row, as the cache holds it, and its fifth bits.
uvec2 own_word(uint cache, uint kv_head, uint word) {
    const uint type = cache_type(cache), n_dims = word_dims(type);
    vec4 low = vec4(0.0), high = vec4(0.0);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        if (i < n_dims) low[i] = own_dim(cache, kv_head, word * n_dims + i);
        if (4u + i < n_dims) high[i] = own_dim(cache, kv_head, word * n_dims + 4u + i);
    }
    return encode(type, low, high, has_scales(type) ? own_numbers(cache, word * n_dims / BLOCK_DIMS) : 0u);
}

void keep_own_word(uint cache, uint word, uvec2 bits) {
    const uint type = cache_type(cache), at = own_raw(cache, word);
    if (word_dims(type) == 8u) {
        own_rows[at].x = bits.x;
        own_rows[at].y = bits.y;
    } else {
        own_rows[at][type == Q8_0 ? word % 2u : word % 4u] = bits.x;
    }
}

// Appends what the blocks of a row share. Every invocation must call it.
void append_own_numbers(uint cache, uvec2 region, uint row) {
    const uint type = cache_type(cache);
    if (type == Q5_1) barrier(); // the fifth bits are there
    for (uint word = lane; word < scale_words(type); word += WORKGROUP_LANES) {
        uint bits = 0u;
        if (type != Q5_1) {
            bits = own_numbers(cache, 2u * word) & 0xFFFFu | own_numbers(cache, 2u * word + 1u) << 16u;
        } else if (word % 2u == 0u) {
            bits = own_numbers(cache, word / 2u);
        } else {
            const uint first = word / 2u * BLOCK_UNITS;
            for (uint unit = first; unit < min(first + BLOCK_UNITS, UNITS); ++unit)
                bits |= own_rows[(cache * UNITS + unit) * UNIT_RAW].y << 2u * (unit - first);
        }
        store_scale_word(type, region, row, word, bits);
    }
}

// Keeps this token's rows in shared memory for this workgroup and, if `writes`, appends them to their regions. Every invocation
// must call it, once own_dim knows the rows.
void append_position(uvec2 keys_at, uvec2 values_at, uint kv_head, uint position, bool writes) {
    const bool has_values = N_CACHES == 2u;
    const uint row = cached_row(kv_head, position);
    if (has_scales(K_TYPE)) find_own_numbers(KEYS, kv_head);
    if (has_values && has_scales(V_TYPE)) find_own_numbers(VALUES, kv_head);
    const uint n_keys = row_words(K_TYPE), n_values = has_values ? row_words(V_TYPE) : 0u, n_words = max(n_keys, n_values);
    for (uint word = lane; word < n_words; word += WORKGROUP_LANES) {
        const bool takes_key = n_keys == n_words || word < n_keys;
        const bool takes_value = has_values && (n_values == n_words || word < n_values);
        const uvec2 key = takes_key ? own_word(KEYS, kv_head, word) : uvec2(0u);
        const uvec2 value = takes_value ? own_word(VALUES, kv_head, word) : uvec2(0u);
        if (takes_key) keep_own_word(KEYS, word, key);
        if (takes_value) keep_own_word(VALUES, word, value);
        if (writes && takes_key) store_row_word(K_TYPE, keys_at, row, word, key.x);
        if (writes && takes_value) store_row_word(V_TYPE, values_at, row, word, value.x);
    }
    if (writes && has_scales(K_TYPE)) append_own_numbers(KEYS, keys_at, row);
    if (writes && has_values && has_scales(V_TYPE)) append_own_numbers(VALUES, values_at, row);
    barrier();
}
