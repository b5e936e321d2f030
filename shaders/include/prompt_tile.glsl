// The walk of prompt_attention.comp on GPUs: a block of BLOCK positions at a time, as two products of tiles through shared memory.
//   scores    queries and keys are staged in chunks of CHUNK vec4s of their rows; a lane has LANE_COLUMNS x LANE_KEYS dot products.
//   softmax   COLUMNS teams of lanes turn scores into weights, relative to the largest score of the column so far.
//   values    a lane has one unit of VALUE_COLUMNS columns, and adds the block's rows of it, times the weights.
// Each dot product and each sum is made by one lane, in rising order. Lanes that are left over idle.
// Needs: prompt_attention.comp, a workgroup whose lanes are a power of two, at least COLUMNS and VALUE_UNITS.
const uint LANES = gl_WorkGroupSize.x;
const uint BLOCK = 32u, BLOCK_VECTORS = BLOCK / 4u;
const uint CHUNK = 8u, CHUNK_STRIDE = CHUNK + 1u; // a gap against bank conflicts
const uint COLUMN_LANES = COLUMNS < 8u ? COLUMNS : 8u;
const uint KEY_LANES = LANES / COLUMN_LANES < BLOCK ? LANES / COLUMN_LANES : BLOCK;
const uint LANE_COLUMNS = COLUMNS / COLUMN_LANES, LANE_KEYS = BLOCK / KEY_LANES;
const uint TEAM = LANES / COLUMNS < BLOCK ? LANES / COLUMNS : BLOCK; // lanes that share the softmax of a column
const uint SHARE = LANES / VALUE_UNITS;
const uint POWER = SHARE >= 16u ? 16u : SHARE >= 8u ? 8u : SHARE >= 4u ? 4u : SHARE >= 2u ? 2u : 1u;
const uint VALUE_COLUMN_LANES = POWER < COLUMNS ? POWER : COLUMNS;
const uint VALUE_COLUMNS = COLUMNS / VALUE_COLUMN_LANES;
const uint STEP = 4u / UNIT_RAW; // positions whose values are loaded at once
const float LOWEST = -3.0e38;
const uint UNSEEN = 0x80000000u; // the bits of the weight of a position that a column does not see: -0

shared vec4 stage[(COLUMNS + BLOCK) * CHUNK_STRIDE]; // of queries, then of keys; after that the weights [COLUMNS][CHUNK_STRIDE]
shared vec4 scores[COLUMNS * CHUNK_STRIDE];          // [COLUMNS][BLOCK_VECTORS and a gap]; LOWEST where nothing is seen
shared float tops[2u * COLUMNS];                     // before and after a block, in turns
shared float totals[COLUMNS];
shared Positions column_seen[COLUMNS];

uint lane;
uint turn;         // which half of `tops` holds what the sums are relative to
float total;       // of the weights of column `lane`
vec4 sums[VALUE_COLUMNS * 2u]; // [column][low, high]

uint value_unit() { return lane % VALUE_UNITS; }
uint value_column(uint c) { return lane / VALUE_UNITS * VALUE_COLUMNS + c; }
bool has_values() { return lane < VALUE_UNITS * VALUE_COLUMN_LANES; }

void begin_columns() {
    lane = gl_LocalInvocationIndex;
    turn = 0u;
    total = 0.0;
    [[unroll]] for (uint i = 0u; i < VALUE_COLUMNS * 2u; ++i) sums[i] = vec4(0.0);
    if (lane < COLUMNS) tops[lane] = LOWEST;
}

// Stages CHUNK vec4s, from vec4 `first` of the rows on, of all queries and of the block's keys. Positions that no row sees may
// never have been written: the nearest that is seen stands in for them.
void stage_chunk(uvec2 keys, Positions seen, uint block, uint first) {
    barrier(); // what was there has been read
    for (uint i = lane; i < COLUMNS * CHUNK; i += LANES) {
        stage[i / CHUNK * CHUNK_STRIDE + i % CHUNK] = query4(i / CHUNK, (first + i % CHUNK) * 4u);
    }
    const uint CHUNK_UNITS = CHUNK / 2u;
    for (uint i = lane; i < BLOCK * CHUNK_UNITS; i += LANES) {
        const uint position = clamp(block + i / CHUNK_UNITS, seen.first, seen.last), unit = first / 2u + i % CHUNK_UNITS;
        const RawUnit raw = load_unit(K_TYPE, keys, cached_row(kv_head(), position), min(unit, UNITS - 1u));
        const uint at = (COLUMNS + i / CHUNK_UNITS) * CHUNK_STRIDE + i % CHUNK_UNITS * 2u;
        stage[at] = decode_low(K_TYPE, raw);
        stage[at + 1u] = decode_high(K_TYPE, raw);
    }
    barrier();
}

// This lane's columns are column_lane + COLUMN_LANES * c, its keys key_lane + KEY_LANES * k.
void score_block(uvec2 keys, Positions seen, uint block) {
    const uint key_lane = lane % KEY_LANES, column_lane = lane / KEY_LANES;
    const bool has_scores = lane < COLUMN_LANES * KEY_LANES;
    precise float dots[LANE_COLUMNS * LANE_KEYS];
    [[unroll]] for (uint i = 0u; i < LANE_COLUMNS * LANE_KEYS; ++i) dots[i] = 0.0;
    for (uint first = 0u; first < UNITS * 2u; first += CHUNK) {
        stage_chunk(keys, seen, block, first);
        [[dont_unroll]] for (uint v = 0u; v < (has_scores ? CHUNK : 0u); ++v) {
            vec4 q[LANE_COLUMNS];
            [[unroll]] for (uint c = 0u; c < LANE_COLUMNS; ++c) q[c] = stage[(column_lane + COLUMN_LANES * c) * CHUNK_STRIDE + v];
            [[unroll]] for (uint k = 0u; k < LANE_KEYS; ++k) {
                const vec4 key = stage[(COLUMNS + key_lane + KEY_LANES * k) * CHUNK_STRIDE + v];
                [[unroll]] for (uint c = 0u; c < LANE_COLUMNS; ++c) {
                    [[unroll]] for (uint i = 0u; i < 4u; ++i)
                        dots[c * LANE_KEYS + k] = fma(q[c][i], key[i], dots[c * LANE_KEYS + k]);
                }
            }
        }
    }
    if (!has_scores) return;
    [[unroll]] for (uint c = 0u; c < LANE_COLUMNS; ++c) {
        const uint column = column_lane + COLUMN_LANES * c;
        const Positions column_sees = column_seen[column];
        [[unroll]] for (uint k = 0u; k < LANE_KEYS; ++k) {
            const uint key = key_lane + KEY_LANES * k;
            const bool sees = includes(column_sees, block + key);
            scores[column * CHUNK_STRIDE + key / 4u][key % 4u] = sees ? dots[c * LANE_KEYS + k] : LOWEST;
        }
    }
}

// Leaves the block's weights in the stage, and each column's new maximum in `tops`.
void weigh_block(uint block) {
    barrier(); // all scores are there, and the stage has been read
    const uint column = lane / TEAM, first_key = lane % TEAM;
    if (column < COLUMNS) {
        vec4 largest = vec4(tops[turn * COLUMNS + column]);
        for (uint v = 0u; v < BLOCK_VECTORS; ++v) largest = max(largest, scores[column * CHUNK_STRIDE + v]);
        const float top = max(max(largest.x, largest.y), max(largest.z, largest.w));
        if (first_key == 0u) tops[(1u - turn) * COLUMNS + column] = top;
        for (uint key = first_key; key < BLOCK; key += TEAM) {
            const uint at = column * CHUNK_STRIDE + key / 4u;
            const bool sees = includes(column_seen[column], block + key);
            stage[at][key % 4u] = sees ? exp(scores[at][key % 4u] - top) : uintBitsToFloat(UNSEEN);
        }
    }
    barrier();
}

float column_fade(uint column) { return fade_of(tops[turn * COLUMNS + column], tops[(1u - turn) * COLUMNS + column]); }

void add_totals() {
    if (lane >= COLUMNS) return;
    precise float sum = total * column_fade(lane);
    for (uint v = 0u; v < BLOCK_VECTORS; ++v) {
        const vec4 weights = stage[lane * CHUNK_STRIDE + v];
        [[unroll]] for (uint i = 0u; i < 4u; ++i) sum += weights[i];
    }
    total = sum;
}

void add_value(uint c, float weight, vec4 low, vec4 high) {
    precise const vec4 more_low = fma(vec4(weight), low, sums[c * 2u]);
    precise const vec4 more_high = fma(vec4(weight), high, sums[c * 2u + 1u]);
    sums[c * 2u] = more_low;
    sums[c * 2u + 1u] = more_high;
}

void fade_values() {
    [[unroll]] for (uint c = 0u; c < VALUE_COLUMNS; ++c) {
        const float fade = column_fade(value_column(c));
        precise const vec4 faded_low = sums[c * 2u] * fade, faded_high = sums[c * 2u + 1u] * fade;
        sums[c * 2u] = faded_low;
        sums[c * 2u + 1u] = faded_high;
    }
}

void add_values(uvec2 values, Positions seen, uint block) {
    [[dont_unroll]] for (uint first = 0u; first < BLOCK; first += 4u) {
        vec4 weights[VALUE_COLUMNS];
        [[unroll]] for (uint c = 0u; c < VALUE_COLUMNS; ++c) weights[c] = stage[value_column(c) * CHUNK_STRIDE + first / 4u];
        [[unroll]] for (uint step = 0u; step < 4u; step += STEP) {
            RawUnit raw[STEP];
            [[unroll]] for (uint i = 0u; i < STEP; ++i) {
                const uint position = clamp(block + first + step + i, seen.first, seen.last);
                raw[i] = load_unit(V_TYPE, values, cached_row(kv_head(), position), value_unit());
            }
            [[unroll]] for (uint i = 0u; i < STEP; ++i) {
                const vec4 low = decode_low(V_TYPE, raw[i]), high = decode_high(V_TYPE, raw[i]);
                [[unroll]] for (uint c = 0u; c < VALUE_COLUMNS; ++c) add_value(c, weights[c][step + i], low, high);
            }
        }
    }
}

// Says whether this lane's columns see the whole block; 0 times what they do not see may be NaN.
bool see_whole(uint block) {
    bool all_see = true;
    [[dont_unroll]] for (uint c = 0u; c < VALUE_COLUMNS; ++c) {
        const Positions column_sees = column_seen[value_column(c)];
        all_see = all_see && includes(column_sees, block) && includes(column_sees, block + BLOCK - 1u);
    }
    return all_see;
}

// The same where a column does not see some position, whatever lies there; takes few registers rather than little time.
void add_seen_values(uvec2 values, Positions seen, uint block) {
    [[dont_unroll]] for (uint i = 0u; i < BLOCK; ++i) {
        const uint position = clamp(block + i, seen.first, seen.last);
        const RawUnit raw = load_unit(V_TYPE, values, cached_row(kv_head(), position), value_unit());
        const vec4 low = decode_low(V_TYPE, raw), high = decode_high(V_TYPE, raw);
        [[unroll]] for (uint c = 0u; c < VALUE_COLUMNS; ++c) {
            const float weight = stage[value_column(c) * CHUNK_STRIDE + i / 4u][i % 4u];
            if (floatBitsToUint(weight) != UNSEEN) add_value(c, weight, low, high);
        }
    }
}

void walk(Run run) {
    barrier(); // the run before has been walked
    if (lane < COLUMNS) column_seen[lane] = is_inert(lane) ? run.seen : seen_in(run, lane); // what inert columns see is stored nowhere
    barrier();
    const uvec2 keys = region_address(K_TYPE, k_cache, run.sequence), values = region_address(V_TYPE, v_cache, run.sequence);
    for (uint block = run.seen.first / BLOCK * BLOCK; block <= run.seen.last; block += BLOCK) {
        score_block(keys, run.seen, block);
        weigh_block(block);
        add_totals();
        if (has_values()) {
            fade_values();
            if (see_whole(block)) add_values(values, run.seen, block);
            else add_seen_values(values, run.seen, block);
        }
        turn = 1u - turn;
    }
}

void store_columns() {
    if (lane < COLUMNS) totals[lane] = total;
    barrier();
    if (!has_values()) return;
    [[unroll]] for (uint c = 0u; c < VALUE_COLUMNS; ++c) {
        const uint column = value_column(c);
        const float factor = closing_factor(column, tops[turn * COLUMNS + column], totals[column]);
        store_unit(column, value_unit(), sums[c * 2u] * factor, sums[c * 2u + 1u] * factor);
    }
}
