// The N_TOP largest items of a list (lower id wins ties), exactly and at a cost that does not depend on the data: a radix
// search for the smallest selected (key, id), 8 bits at a time from the top, then one pass that collects and one that ranks.
// Atomics only count integers, so the result does not depend on their order.
// Needs: float_order.glsl; functions uint item_key(uint) (KEY_NONE = absent) and uint item_id(uint) with ids below 2^24.
const uint N_TOP = 64u;
const uint DIGITS = 256u, DIGIT_GROUP = 16u;
const uint ID_RANGE = 0xFFFFFFu;

shared uint digit_counts[DIGITS];
shared uint group_counts[DIGITS / DIGIT_GROUP];
shared uint taken_keys[N_TOP], taken_ids[N_TOP];
shared uint n_taken;

struct Cut { uint key; uint reversed_id; }; // an item is selected if (key, ID_RANGE - id) >= this

uint reversed_id(uint item) { return ID_RANGE - min(item_id(item), ID_RANGE); }

// Counts a digit of every item that agrees with the cut above `shift`: of the key, or of the id among items of the cut's key.
void count_digits(uint n_items, Cut cut, bool by_key, uint shift) {
    for (uint i = gl_LocalInvocationIndex; i < DIGITS; i += gl_WorkGroupSize.x) digit_counts[i] = 0u;
    barrier();
    const uint settled = shift >= 24u ? 0u : 0xFFFFFFFFu << (shift + 8u);
    for (uint i = gl_LocalInvocationIndex; i < n_items; i += gl_WorkGroupSize.x) {
        const uint key = item_key(i);
        if (by_key) {
            if (key != KEY_NONE && (key & settled) == cut.key) atomicAdd(digit_counts[(key >> shift) & 255u], 1u);
        } else if (key == cut.key) {
            const uint reversed = reversed_id(i);
            if ((reversed & settled) == cut.reversed_id) atomicAdd(digit_counts[(reversed >> shift) & 255u], 1u);
        }
    }
    barrier();
    for (uint g = gl_LocalInvocationIndex; g < DIGITS / DIGIT_GROUP; g += gl_WorkGroupSize.x) {
        uint sum = 0u;
        for (uint i = 0u; i < DIGIT_GROUP; ++i) sum += digit_counts[g * DIGIT_GROUP + i];
        group_counts[g] = sum;
    }
    barrier();
}

// The digit at which counting from the largest reaches `needed`; takes what lies above it off `needed`.
uint digit_of_cut(inout uint needed) {
    uint g = DIGITS / DIGIT_GROUP - 1u;
    while (g > 0u && group_counts[g] < needed) needed -= group_counts[g--];
    uint digit = g * DIGIT_GROUP + DIGIT_GROUP - 1u;
    while (digit > g * DIGIT_GROUP && digit_counts[digit] < needed) needed -= digit_counts[digit--];
    return digit;
}

// The smallest selected (key, id). All invocations compute the same; `n_selected` is min(N_TOP, items present).
Cut find_cut(uint n_items, out uint n_selected) {
    Cut cut = Cut(0u, 0u);
    uint needed = 0u;
    for (uint pass = 0u; pass < 7u; ++pass) {
        const bool by_key = pass < 4u;
        const uint shift = by_key ? 24u - 8u * pass : 16u - 8u * (pass - 4u);
        count_digits(n_items, cut, by_key, shift);
        if (pass == 0u) {
            uint present = 0u;
            for (uint g = 0u; g < DIGITS / DIGIT_GROUP; ++g) present += group_counts[g];
            n_selected = min(N_TOP, present);
            needed = n_selected;
            if (needed == 0u) break;
        }
        const uint digit = digit_of_cut(needed);
        if (by_key) cut.key |= digit << shift;
        else cut.reversed_id |= digit << shift;
        if (digit_counts[digit] == needed) break; // everything that shares these digits is selected
        barrier();
    }
    return cut;
}

// Fills taken_keys and taken_ids with the selected items, in no order. Returns how many.
uint take_top(uint n_items) {
    uint n_selected;
    const Cut cut = find_cut(n_items, n_selected);
    if (gl_LocalInvocationIndex == 0u) n_taken = 0u;
    barrier();
    for (uint i = gl_LocalInvocationIndex; i < n_items; i += gl_WorkGroupSize.x) {
        const uint key = item_key(i);
        if (key == KEY_NONE || key < cut.key || (key == cut.key && reversed_id(i) < cut.reversed_id)) continue;
        const uint slot = min(atomicAdd(n_taken, 1u), N_TOP - 1u);
        taken_keys[slot] = key;
        taken_ids[slot] = item_id(i);
    }
    barrier();
    return n_selected;
}

// The place of a taken item in descending order.
uint rank_of(uint slot, uint n_selected) {
    const uint key = taken_keys[slot], id = taken_ids[slot];
    uint rank = 0u;
    for (uint i = 0u; i < n_selected; ++i) {
        if (taken_keys[i] > key || (taken_keys[i] == key && taken_ids[i] < id)) ++rank;
    }
    return rank;
}
