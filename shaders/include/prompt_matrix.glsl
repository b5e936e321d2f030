// The walk of prompt_attention.comp on GPUs with matrix units: a block of BLOCK positions at a time, as two products of matrices
// of f16 with sums of f32. Queries stay in shared memory; keys, then values, pass through it in chunks of their dims.
//   scores    [COLUMNS][BLOCK]: a subgroup has some matrices of them, and leaves them in shared memory.
//   softmax   teams of TEAM lanes turn a column's scores into weights, relative to its largest score so far, times WEIGHT_UNIT.
//   values    a subgroup has the sums of all columns for some dims, fades them and adds weights times values.
// What an element of a product is depends on its row and column alone. A weight of 0 keeps finite values from a column that does
// not see them. Where a column does not see all of a block, what is not finite counts as 0, and those that see it get NaN after.
// A query is divided by its unit, a power of two, before it becomes f16 (matrix_units.glsl); products of cached f16 with
// that stay below 2^37. Weights are 2^15 at most, those below 2^-29 of the largest lose digits. twins.py bounds the error.
// Needs: prompt_attention.comp, whole subgroups, LANES of 1 to BLOCK / 8 times COLUMNS, matrices of 8, 16 or 32.
#include "matrix_units.glsl"
#extension GL_KHR_shader_subgroup_shuffle : require

const uint LANES = gl_WorkGroupSize.x;
const uint N_SUBGROUPS = LANES / SUBGROUP_SIZE;
const uint BLOCK = 32u, BLOCK_SLICES = BLOCK / 8u; // a slice: 8 numbers of f16, 16 bytes
const uint CHUNK_SLICES = 16u;                     // of a row, that are staged at once
const uint WHOLE_SLICES = 4u;                      // which all matrices divide
const uint QUERY_SLICES = (UNITS + WHOLE_SLICES - 1u) / WHOLE_SLICES * WHOLE_SLICES;
const uint WIDTH = QUERY_SLICES < CHUNK_SLICES ? QUERY_SLICES : CHUNK_SLICES; // of a chunk
const uint CHUNK_STRIDE = WIDTH + 1u; // an empty one, for the banks
const uint QUERY_STRIDE = QUERY_SLICES + 1u, WEIGHT_STRIDE = BLOCK_SLICES + 1u;
const uint SCORE_STRIDE = BLOCK / 4u + 1u; // vec4s
const uint DEPTH_SLICES = MATRIX_DEPTH / 8u;
const uint COLUMN_MATRICES = COLUMNS / MATRIX_ROWS;
const uint SCORE_MATRICES = COLUMN_MATRICES * (BLOCK / MATRIX_COLUMNS);
const uint OWN_SCORES = (SCORE_MATRICES + N_SUBGROUPS - 1u) / N_SUBGROUPS;
const bool SAME_QUERIES = N_SUBGROUPS % COLUMN_MATRICES == 0u; // of a subgroup's scores
const uint CHUNK_MATRICES = WIDTH * 8u / MATRIX_COLUMNS; // across the dims of a chunk
const uint OWN_OF_CHUNK = (CHUNK_MATRICES + N_SUBGROUPS - 1u) / N_SUBGROUPS;
const uint VALUE_CHUNKS = (VALUE_UNITS + CHUNK_SLICES - 1u) / CHUNK_SLICES;
const uint CHUNK_SUMS = OWN_OF_CHUNK * COLUMN_MATRICES, N_SUMS = VALUE_CHUNKS * CHUNK_SUMS;
const uint MATRIX_VEC4S = MATRIX_ROWS * MATRIX_COLUMNS / 4u;
const uint STAGED_VEC4S = N_SUBGROUPS * MATRIX_VEC4S; // a matrix of each subgroup
const uint SCORE_VEC4S = COLUMNS * SCORE_STRIDE;
const uint TEAM = LANES / COLUMNS < BLOCK_SLICES ? LANES / COLUMNS : BLOCK_SLICES;
const uint KEYS_SIZE = BLOCK * CHUNK_STRIDE, VALUES_SIZE = WIDTH * 8u * WEIGHT_STRIDE;
const uint LANE_KEYS = BLOCK / TEAM;
const float LOWEST = -3.0e38;
const float WEIGHT_UNIT = 32768.0;

shared uvec4 query_tile[COLUMNS * QUERY_STRIDE];
shared uvec4 chunk_tile[KEYS_SIZE > VALUES_SIZE ? KEYS_SIZE : VALUES_SIZE];
shared uvec4 weight_tile[COLUMNS * WEIGHT_STRIDE];
shared vec4 scores[SCORE_VEC4S > STAGED_VEC4S ? SCORE_VEC4S : STAGED_VEC4S]; // or matrices of sums
shared float fades[COLUMNS];                   // at last the factors of the sums
shared Positions column_seen[COLUMNS];
shared uint is_odd; // whether a value is not finite, in a block that a column does not see all of

#define SumMatrix coopmat<float, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_COLUMNS, gl_MatrixUseAccumulator>
#define ColumnMatrix coopmat<float16_t, gl_ScopeSubgroup, MATRIX_ROWS, MATRIX_DEPTH, gl_MatrixUseA>
#define CachedMatrix coopmat<float16_t, gl_ScopeSubgroup, MATRIX_DEPTH, MATRIX_COLUMNS, gl_MatrixUseB>

SumMatrix sums[N_SUMS]; // [chunk][own of the chunk][matrix of columns]

uint lane;
float column_unit; // this and the next two are of the column of this lane's team
float top;         // that the sums are relative to
float total;       // of the weights

uint team_column() { return min(lane / TEAM, COLUMNS - 1u); }
bool has_column() { return lane < TEAM * COLUMNS; }
uint first_key() { return lane % TEAM * LANE_KEYS; }

float team_max(float value) {
    [[unroll]] for (uint i = 1u; i < TEAM; i *= 2u) value = max(value, subgroupShuffleXor(value, i));
    return value;
}

float team_sum(float value) {
    [[unroll]] for (uint i = 1u; i < TEAM; i *= 2u) {
        precise const float sum = value + subgroupShuffleXor(value, i);
        value = sum;
    }
    return value;
}

void begin_columns() {
    lane = gl_SubgroupID * SUBGROUP_SIZE + gl_SubgroupInvocationID;
    total = 0.0;
    top = LOWEST;
    [[unroll]] for (uint i = 0u; i < N_SUMS; ++i) sums[i] = SumMatrix(0.0);
    const uint column = team_column(), of_team = lane % TEAM;
    float peak = 0.0;
    for (uint d = of_team * 4u; d < ROW_DIM; d += TEAM * 4u) peak = max(peak, peak_of(query4(column, d)));
    column_unit = unit_of(team_max(peak));
    const float inverse = inverse_of(column_unit);
    for (uint i = of_team; i < QUERY_SLICES; i += TEAM) {
        const uvec4 slice = slice_of(query4(column, i * 8u), query4(column, i * 8u + 4u), inverse);
        if (has_column()) query_tile[column * QUERY_STRIDE + i] = slice;
    }
}

// ----- staging -----

uvec4 halves_of(uint type, RawUnit raw) {
    if (type == F16) return raw.first;
    const vec4 low = decode_low(type, raw), high = decode_high(type, raw);
    return uvec4(pack_half2(low.x, low.y), pack_half2(low.z, low.w), pack_half2(high.x, high.y), pack_half2(high.z, high.w));
}

uint finite_halves(uint halves) {
    const uint low = (halves & 0x7C00u) == 0x7C00u ? 0u : halves & 0xFFFFu;
    return low | ((halves & 0x7C000000u) == 0x7C000000u ? 0u : halves & 0xFFFF0000u);
}

// A slice of a row; zeros behind the last. Positions that no row sees may never have been written: the nearest that is seen stands
// in for them.
uvec4 row_slice(uint type, uvec2 region, Positions seen, uint position, uint unit) {
    const uint row = cached_row(kv_head(), clamp(position, seen.first, seen.last));
    const uvec4 slice = halves_of(type, load_unit(type, region, row, min(unit, UNITS - 1u)));
    return unit < UNITS ? slice : uvec4(0u);
}

// Stages a chunk of the block's keys, from slice `first` on: [position][dims].
void stage_keys(uvec2 keys, Positions seen, uint block, uint first) {
    [[dont_unroll]] for (uint begin = 0u; begin < BLOCK * WIDTH; begin += LANES) {
        const uint i = min(begin + lane, BLOCK * WIDTH - 1u);
        chunk_tile[i / WIDTH * CHUNK_STRIDE + i % WIDTH] = row_slice(K_TYPE, keys, seen, block + i / WIDTH, first + i % WIDTH);
    }
}

// Stages one of its values: [dim][positions], so that a matrix has whole slices there, too. With only_finite, see is_odd.
void stage_values(uvec2 values, Positions seen, uint block, uint first, bool only_finite) {
    const uint PAIRS = BLOCK / 2u;
    [[dont_unroll]] for (uint begin = 0u; begin < PAIRS * WIDTH; begin += LANES) {
        const uint i = min(begin + lane, PAIRS * WIDTH - 1u), pair = i % PAIRS, slice = i / PAIRS;
        uvec4 even = row_slice(V_TYPE, values, seen, block + 2u * pair, first + slice);
        uvec4 odd = row_slice(V_TYPE, values, seen, block + 2u * pair + 1u, first + slice);
        if (only_finite) {
            const uvec4 even_before = even, odd_before = odd;
            [[unroll]] for (uint k = 0u; k < 4u; ++k) {
                even[k] = finite_halves(even[k]);
                odd[k] = finite_halves(odd[k]);
            }
            if (even != even_before || odd != odd_before) is_odd = 1u;
        }
        const uint at = slice * 8u * WEIGHT_STRIDE + pair / 4u;
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            chunk_tile[at + 2u * k * WEIGHT_STRIDE][pair % 4u] = even[k] & 0xFFFFu | odd[k] << 16u;
            chunk_tile[at + (2u * k + 1u) * WEIGHT_STRIDE][pair % 4u] = even[k] >> 16u | odd[k] & 0xFFFF0000u;
        }
    }
}

// ----- scores -----

void score_block(uvec2 keys, Positions seen, uint block) {
    SumMatrix dots[OWN_SCORES];
    [[unroll]] for (uint i = 0u; i < OWN_SCORES; ++i) dots[i] = SumMatrix(0.0);
    [[dont_unroll]] for (uint first = 0u; first < QUERY_SLICES; first += CHUNK_SLICES) {
        share(); // what was there has been read
        stage_keys(keys, seen, block, first);
        share();
        const uint n_slices = min(CHUNK_SLICES, QUERY_SLICES - first);
        [[unroll]] for (uint k = 0u; k < WIDTH; k += DEPTH_SLICES) {
            if (k >= n_slices) break;
            ColumnMatrix q;
            [[unroll]] for (uint i = 0u; i < OWN_SCORES; ++i) {
                const uint m = min(gl_SubgroupID + i * N_SUBGROUPS, SCORE_MATRICES - 1u);
                if (i == 0u || !SAME_QUERIES)
                    coopMatLoad(q, query_tile, m % COLUMN_MATRICES * MATRIX_ROWS * QUERY_STRIDE + first + k, QUERY_STRIDE,
                                gl_CooperativeMatrixLayoutRowMajor);
                CachedMatrix key;
                coopMatLoad(key, chunk_tile, m / COLUMN_MATRICES * MATRIX_COLUMNS * CHUNK_STRIDE + k, CHUNK_STRIDE,
                            gl_CooperativeMatrixLayoutColumnMajor);
                dots[i] = coopMatMulAdd(q, key, dots[i]);
            }
        }
    }
    [[unroll]] for (uint i = 0u; i < OWN_SCORES; ++i) {
        const uint m = gl_SubgroupID + i * N_SUBGROUPS;
        if (m < SCORE_MATRICES)
            coopMatStore(dots[i], scores,
                         m % COLUMN_MATRICES * MATRIX_ROWS * SCORE_STRIDE + m / COLUMN_MATRICES * (MATRIX_COLUMNS / 4u),
                         SCORE_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
    }
}

// Turns scores into weights.
void weigh_block(uint block) {
    const uint column = team_column(), at = column * SCORE_STRIDE + first_key() / 4u;
    const Positions sees = column_seen[column];
    float own[LANE_KEYS];
    float highest = top;
    [[unroll]] for (uint i = 0u; i < LANE_KEYS; ++i) {
        own[i] = includes(sees, block + first_key() + i) ? scores[at + i / 4u][i % 4u] * column_unit : LOWEST;
        highest = max(highest, own[i]);
    }
    highest = team_max(highest);
    const float fade = fade_of(top, highest);
    precise float sum = 0.0;
    [[unroll]] for (uint k = 0u; k < LANE_KEYS; k += 8u) {
        uvec4 slice;
        [[unroll]] for (uint i = 0u; i < 8u; i += 2u) {
            vec2 weights;
            [[unroll]] for (uint j = 0u; j < 2u; ++j) {
                const bool is_seen = includes(sees, block + first_key() + k + i + j);
                weights[j] = is_seen ? exp(own[k + i + j] - highest) * WEIGHT_UNIT : 0.0;
            }
            slice[i / 2u] = two_halves(weights);
            const vec2 rounded = unpackHalf2x16(slice[i / 2u]);
            sum += rounded.x;
            sum += rounded.y;
        }
        if (has_column()) weight_tile[column * WEIGHT_STRIDE + (first_key() + k) / 8u] = slice;
    }
    precise const float faded = total * fade, more = team_sum(sum) * (1.0 / WEIGHT_UNIT);
    precise const float new_total = faded + more;
    total = new_total;
    top = highest;
    if (has_column() && lane % TEAM == 0u) fades[column] = fade;
}

// ----- values -----

// The first matrix of dims of a subgroup's, in a chunk, and its number among all.
uint chunk_matrix(uint i) { return gl_SubgroupID + i * N_SUBGROUPS; }

void fade_sums() {
    SumMatrix factors[COLUMN_MATRICES];
    [[unroll]] for (uint c = 0u; c < COLUMN_MATRICES; ++c)
        coopMatLoad(factors[c], fades, c * MATRIX_ROWS, 0u, gl_CooperativeMatrixLayoutColumnMajor);
    [[unroll]] for (uint i = 0u; i < N_SUMS; ++i) sums[i] = sums[i] * factors[i % COLUMN_MATRICES];
}

// Adds to the sums that are in front, those of the chunk.
void add_chunk() {
    [[unroll]] for (uint k = 0u; k < BLOCK_SLICES; k += DEPTH_SLICES) {
        share_in_subgroup(); // nothing is loaded ahead: registers
        ColumnMatrix weights[COLUMN_MATRICES];
        [[unroll]] for (uint c = 0u; c < COLUMN_MATRICES; ++c)
            coopMatLoad(weights[c], weight_tile, c * MATRIX_ROWS * WEIGHT_STRIDE + k, WEIGHT_STRIDE,
                        gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint i = 0u; i < OWN_OF_CHUNK; ++i) {
            const uint m = min(chunk_matrix(i), CHUNK_MATRICES - 1u);
            CachedMatrix values;
            coopMatLoad(values, chunk_tile, m * MATRIX_COLUMNS * WEIGHT_STRIDE + k, WEIGHT_STRIDE,
                        gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint c = 0u; c < COLUMN_MATRICES; ++c) {
                const uint at = i * COLUMN_MATRICES + c;
                sums[at] = coopMatMulAdd(weights[c], values, sums[at]);
            }
        }
    }
}

// Other sums come to the front, those of the next matrix or chunk: registers have no index. After a whole turn all are where they
// were.
void turn_sums(const uint n) {
    SumMatrix first[N_SUMS];
    [[unroll]] for (uint i = 0u; i < n; ++i) first[i] = sums[i];
    [[unroll]] for (uint i = n; i < N_SUMS; ++i) sums[i - n] = sums[i];
    [[unroll]] for (uint i = 0u; i < n; ++i) sums[N_SUMS - n + i] = first[i];
}

// Where four elements of a subgroup's matrix of sums are, which was number `turn` before all turns.
struct Place {
    uint column;
    uint dim;
    bool is_own; // no other subgroup has it, and it is one of the row's
};

Place place_of(uint turn, uint vec4_index) {
    const uint chunk_turn = turn / COLUMN_MATRICES, m = chunk_matrix(chunk_turn % OWN_OF_CHUNK);
    const uint row_vec4s = MATRIX_COLUMNS / 4u;
    const uint of_chunk = m * MATRIX_COLUMNS + vec4_index % row_vec4s * 4u;
    const uint dim = chunk_turn / OWN_OF_CHUNK * CHUNK_SLICES * 8u + of_chunk;
    return Place(turn % COLUMN_MATRICES * MATRIX_ROWS + vec4_index / row_vec4s, dim, m < CHUNK_MATRICES && dim < VALUE_DIM);
}

bool is_finite(float value) { return (floatBitsToUint(value) & 0x7F800000u) != 0x7F800000u; }

// Makes NaN of the sums of columns that see what is not finite.
void spoil_sums(uvec2 values, uint block) {
    [[dont_unroll]] for (uint turn = 0u; turn < N_SUMS; ++turn) {
        share_in_subgroup(); // what was staged before has been read
        for (uint i = gl_SubgroupInvocationID; i < MATRIX_VEC4S; i += SUBGROUP_SIZE) {
            const Place place = place_of(turn, i);
            vec4 more = vec4(0.0);
            for (uint position = block; position < (place.is_own ? block + BLOCK : block); ++position) {
                if (!includes(column_seen[place.column], position)) continue;
                const RawUnit raw = load_unit(V_TYPE, values, cached_row(kv_head(), position), place.dim / 8u);
                const vec4 value = place.dim % 8u == 0u ? decode_low(V_TYPE, raw) : decode_high(V_TYPE, raw);
                [[unroll]] for (uint k = 0u; k < 4u; ++k) more[k] = is_finite(value[k]) ? more[k] : uintBitsToFloat(0x7FC00000u);
            }
            scores[gl_SubgroupID * MATRIX_VEC4S + i] = more;
        }
        share_in_subgroup();
        SumMatrix more;
        coopMatLoad(more, scores, gl_SubgroupID * MATRIX_VEC4S, MATRIX_COLUMNS / 4u, gl_CooperativeMatrixLayoutRowMajor);
        sums[0] = sums[0] + more;
        turn_sums(1u);
    }
}

void add_values(uvec2 values, Positions seen, uint block, bool all_see) {
    [[dont_unroll]] for (uint chunk = 0u; chunk < VALUE_CHUNKS; ++chunk) {
        if (chunk > 0u) share(); // the chunk before has been read
        stage_values(values, seen, block, chunk * CHUNK_SLICES, !all_see);
        share();
        if (chunk == 0u) fade_sums();
        add_chunk();
        if (VALUE_CHUNKS > 1u) turn_sums(CHUNK_SUMS);
    }
    if (!all_see && is_odd != 0u) spoil_sums(values, block);
}

// What every column sees.
Positions seen_by_all(Run run) {
    Positions seen = run.seen;
    for (uint column = 0u; column < COLUMNS; ++column) {
        const Positions sees = column_seen[column];
        seen = Positions(max(seen.first, sees.first), min(seen.last, sees.last));
    }
    return seen;
}

void walk(Run run) {
    share(); // the run before has been walked
    if (lane < COLUMNS) column_seen[lane] = is_inert(lane) ? run.seen : seen_in(run, lane); // what inert columns see is stored nowhere
    share();
    const Positions whole = seen_by_all(run);
    const uvec2 keys = region_address(K_TYPE, k_cache, run.sequence), values = region_address(V_TYPE, v_cache, run.sequence);
    [[dont_unroll]] for (uint block = run.seen.first / BLOCK * BLOCK; block <= run.seen.last; block += BLOCK) {
        score_block(keys, run.seen, block);
        is_odd = 0u;
        share(); // scores are there, and keys have been read
        weigh_block(block);
        add_values(values, run.seen, block, includes(whole, block) && includes(whole, block + BLOCK - 1u));
    }
}

// Without what blocks that a column does not see may leave or flush: the sign of zero, numbers that are not normal.
vec4 cleared(vec4 values) {
    const uvec4 bits = floatBitsToUint(values);
    return mix(values, vec4(0.0), equal(bits & 0x7F800000u, uvec4(0u)));
}

void store_columns() {
    share(); // fades have been read
    if (has_column() && lane % TEAM == 0u)
        fades[team_column()] = closing_factor(team_column(), top, total) * (1.0 / WEIGHT_UNIT);
    share();
    const uint staging = gl_SubgroupID * MATRIX_VEC4S;
    [[dont_unroll]] for (uint turn = 0u; turn < N_SUMS; ++turn) {
        share_in_subgroup(); // what was staged before has been read
        coopMatStore(sums[0], scores, staging, MATRIX_COLUMNS / 4u, gl_CooperativeMatrixLayoutRowMajor);
        turn_sums(1u);
        share_in_subgroup();
        for (uint i = gl_SubgroupInvocationID * 2u; i < MATRIX_VEC4S; i += SUBGROUP_SIZE * 2u) {
            const Place place = place_of(turn, i);
            const float factor = fades[place.column];
            precise const vec4 low = cleared(scores[staging + i]) * factor, high = cleared(scores[staging + i + 1u]) * factor;
            if (place.is_own) store_unit(place.column, place.dim / 8u, low, high);
        }
    }
}
