#include "turn.hpp"

#include <algorithm>
#include <limits>

namespace vkmoe {

namespace {

constexpr int64_t kNoPool = -1;

/// Newcomers in the order of their claim: landed, missed, then guessed.
struct Claims {
    std::vector<int64_t> keys;
    std::vector<double> bids;
    size_t n_landed = 0, n_missed = 0;  // the first so many; those and the next
};

bool can_be_copied(const Asked& asked, int64_t key) {
    return asked.host == nullptr || asked.host[key] == kPresent;
}

/// The likeliest experts without a slot, but for those that were missed.
std::vector<int64_t> guesses(const Record& record, const Asked& asked) {
    std::vector<int64_t> found;
    if (asked.scores == nullptr) return found;
    const int64_t* const end = asked.missing + asked.n_missing;
    for (size_t key = 0; key < record.n_keys(); ++key) {
        if (!(asked.scores[key] > asked.likely) || record.state[key] != kAbsent) continue;
        const auto one = static_cast<int64_t>(key);
        if (record.pool_of[key] == kNoPool || std::find(asked.missing, end, one) != end) continue;
        found.push_back(one);
    }
    std::stable_sort(found.begin(), found.end(), [&](int64_t one, int64_t other) {
        return asked.scores[one] > asked.scores[other];
    });
    if (found.size() > asked.most) found.resize(asked.most);
    return found;
}

Claims claims(const Record& record, const Derived& derived, const Asked& asked) {
    Claims all;
    const auto add = [&](int64_t key, double toll) {
        all.keys.push_back(key);
        const double bid = asked.worth[key] / toll;
        all.bids.push_back(derived.pins[key] ? std::numeric_limits<double>::infinity() : bid);
    };
    const auto& landed = asked.landed;
    std::vector<int64_t> others;
    for (size_t i = 0; i < asked.n_missing; ++i) {
        const int64_t key = asked.missing[i];
        if (std::find(landed.begin(), landed.end(), key) != landed.end()) {
            add(key, 1.0);
        } else if (can_be_copied(asked, key)) {
            others.push_back(key);
        }
    }
    all.n_landed = all.keys.size();
    for (const int64_t key : others) add(key, asked.toll);
    all.n_missed = all.keys.size();
    for (const int64_t key : guesses(record, asked)) {
        if (can_be_copied(asked, key)) add(key, asked.guess_toll);
    }
    return all;
}

/// Which experts may not leave [n_keys].
std::vector<char> needed(const Record& record, const Asked& asked) {
    std::vector<char> found(record.n_keys());
    for (size_t key = 0; key < found.size(); ++key) found[key] = record.state[key] > kPresent;
    if (asked.backs) {
        for (size_t key = 0; key < found.size(); ++key) {
            found[key] |= record.state[key] != kAbsent && asked.host[key] != kPresent;
        }
    }
    for (size_t i = 0; i < asked.n_used; ++i) found[asked.used[i]] = true;
    return found;
}

std::vector<Admitted> admitted(const Record& record, const Derived& derived, const Asked& asked,
                               const Claims& all) {
    const size_t n = all.keys.size();
    std::vector<int64_t> pools(n), slot_bytes(n), n_waiting(record.n_pools);
    for (size_t i = 0; i < n; ++i) {
        pools[i] = record.pool_of[all.keys[i]];
        slot_bytes[i] = record.slot_bytes[pools[i]];
        ++n_waiting[pools[i]];
    }
    for (int64_t& pool : pools) {
        if (n_waiting[pool] <= derived.n_free[pool]) pool = kRoomy;
    }
    const std::vector<char> stays = needed(record, asked);
    const Newcomers newcomers{all.keys.data(), all.bids.data(), pools.data(), slot_bytes.data(),
                              n,               all.n_landed,    asked.budget_bytes};
    const Residents residents{derived.holders,
                              nullptr,
                              asked.worth,
                              derived.n_free,
                              record.newest,
                              record.floors,
                              record.n_pools,
                              derived.n_slots,
                              derived.unpinned,
                              reinterpret_cast<const bool*>(stays.data()),
                              record.recency,
                              record.n_keys(),
                              record.n_experts};
    return admit(newcomers, residents);
}

/// Notes that an expert has a slot; returns whether a pin is involved, and what is derived waits.
bool enter(const Record& record, const Derived& derived, int64_t key, int64_t victim) {
    const int64_t pool = record.pool_of[key];
    int64_t slot = 0;
    if (victim == kFree) {
        slot = derived.free[pool * static_cast<int64_t>(derived.n_slots) + --derived.n_free[pool]];
    } else {
        slot = record.slot_of[victim];
        record.changed[victim] = true;
        record.state[victim] = kAbsent;
    }
    record.slot_of[key] = slot;
    record.state[key] = kWaiting;
    derived.holders[derived.entry_of[slot]] = key;
    if (victim != kFree) derived.unpinned[victim] = false;
    derived.unpinned[key] = true;
    return derived.pins[key] || (victim != kFree && derived.pins[victim]);
}

}  // namespace

std::vector<int64_t> observe(const Record& record, const Used& used,
                             const std::vector<double>& weights, int32_t first_turn,
                             int64_t* keys) {
    std::vector<int64_t> missing;
    for (size_t layer = 0; layer < used.n_layers; ++layer) {
        for (size_t rank = 0; rank < used.n_used; ++rank) {
            const size_t i = layer * used.n_used + rank;
            keys[i] = static_cast<int64_t>(layer * record.n_experts + used.ids[i]);
        }
    }
    const size_t n = used.n_layers * used.n_used;
    for (size_t each = 0; each < weights.size(); ++each) {
        for (size_t i = 0; i < n; ++i) record.counts[each][keys[i]] += weights[each];
    }
    for (size_t rank = 0; rank < used.n_used; ++rank) {
        for (size_t layer = 0; layer < used.n_layers; ++layer) {
            const int64_t key = keys[layer * used.n_used + rank];
            if (record.state[key] != kAbsent) {
                record.again[key] = true;
                record.recency[key] = first_turn++;
            } else if (record.pool_of[key] != kNoPool) {
                missing.push_back(key);
            }
        }
    }
    return missing;
}

void look_out(const Record& record, const Shares& known, const Outlook& outlook, double* worth,
              double* scores) {
    const size_t n = record.n_experts;
    std::vector<double> usual(n), chances(n);
    Rows rows(record.counts.begin(), record.counts.end());
    for (size_t layer = 0; layer < record.n_layers; ++layer, worth += n, scores += n) {
        blend(rows, outlook.factors, n, usual.data());
        for (const double*& counts : rows) counts += n;
        const double rest = outlook.shares.back();
        for (size_t id = 0; id < n; ++id) worth[id] = rest * usual[id];
        for (size_t each = 0; each < outlook.runs.size(); ++each) {
            const Run& run = outlook.runs[each];
            const double doubt = run.doubt, share = outlook.shares[each];
            std::fill(chances.begin(), chances.end(), 0.0);
            add_shares(known, layer, run.rows, run.factors, chances.data());
            for (size_t id = 0; id < n; ++id) {
                chances[id] = std::min(chances[id] + doubt * usual[id], 1.0);
                worth[id] += share * chances[id];
            }
            if (each == outlook.scored) std::copy(chances.begin(), chances.end(), scores);
        }
    }
}

Misses misses(const int64_t* keys, const bool* hits, const bool* stored, size_t n_rows,
              const Used& shape, size_t n_experts, size_t n_landing) {
    Misses found{std::vector<int64_t>(shape.n_layers), {}, {}};
    std::vector<char> is_counted(shape.n_layers * n_experts);
    for (size_t row = 0; row < n_rows; ++row) {
        for (size_t layer = 0; layer < shape.n_layers; ++layer) {
            size_t place = 0;
            for (size_t rank = 0; rank < shape.n_used; ++rank, ++keys, ++hits) {
                const size_t i = (row * shape.n_layers + layer) * shape.n_used + rank;
                if (*hits) continue;
                if (!is_counted[*keys]) ++found.n_of_layer[layer];
                is_counted[*keys] = true;
                if (stored != nullptr && stored[i] && place < n_landing) {
                    found.landed.push_back(*keys);
                    found.places.push_back(static_cast<int64_t>(place));
                }
                ++place;
            }
        }
    }
    return found;
}

std::vector<Entered> decide(const Record& record, const Derived& derived, const Asked& asked,
                            bool& renew) {
    const Claims all = claims(record, derived, asked);
    std::vector<Entered> entered;
    if (all.keys.empty()) return entered;
    int32_t turn = asked.first_turn;
    renew = false;
    for (const Admitted& one : admitted(record, derived, asked, all)) {
        const int64_t key = all.keys[one.newcomer];
        record.newest[record.pool_of[key]] = key;
        record.recency[key] = turn++;
        record.again[key] = false;
        renew |= enter(record, derived, key, one.victim);
        entered.push_back({key, one.victim, one.newcomer < all.n_landed,
                           one.newcomer >= all.n_missed});
    }
    return entered;
}

}  // namespace vkmoe
