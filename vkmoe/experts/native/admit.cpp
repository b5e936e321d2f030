#include "admit.hpp"

#include <algorithm>
#include <numeric>

namespace vkmoe {

namespace {

constexpr size_t kNone = static_cast<size_t>(-1);

/// One pool while its slots are given away.
class Pool {
public:
    Pool(const Residents& all, size_t index)
        : all_(all),
          keys_(all.keys + index * all.n_slots),
          values_(all.values == nullptr ? nullptr : all.values + index * all.n_slots),
          n_free_(all.n_free[index]),
          newest_(all.newest[index]) {
        if (all.floors[index] == 0) return;
        spare_.assign(all.n_keys / all.n_experts, -all.floors[index]);
        for (size_t slot = 0; slot < all.n_slots; ++slot) {
            if (is_held(slot)) ++spare_[layer(keys_[slot])];
        }
    }

    bool has_free() const { return n_free_ > 0; }

    /// The slot that a newcomer would get of those that are held; kNone: none may leave.
    size_t first_for(int64_t newcomer) const {
        size_t best = kNone, last = kNone;
        for (size_t slot = 0; slot < all_.n_slots; ++slot) {
            if (!is_held(slot)) continue;
            const int64_t key = keys_[slot];
            // First what most slots fail by: there are many.
            if (best != kNone && !is_before(slot, best) && key != newest_) continue;
            if (is_taken(slot) || !all_.may_leave[key] || all_.needed[key]) continue;
            if (!can_spare(key, newcomer)) continue;
            (key == newest_ ? last : best) = slot;
        }
        return best == kNone ? last : best;
    }

    int64_t key(size_t slot) const { return keys_[slot]; }

    double value(size_t slot) const {
        return values_ == nullptr ? all_.worth[keys_[slot]] : values_[slot];
    }

    void take_free(int64_t newcomer) {
        --n_free_;
        enter(newcomer);
    }

    void take(size_t slot, int64_t newcomer) {
        taken_.push_back(slot);
        enter(newcomer);
        if (!spare_.empty()) --spare_[layer(keys_[slot])];
    }

    bool closed = false;  // the others bid less than one that did not get in

private:
    size_t layer(int64_t key) const { return static_cast<size_t>(key) / all_.n_experts; }

    bool is_taken(size_t slot) const {
        return std::find(taken_.begin(), taken_.end(), slot) != taken_.end();
    }

    bool is_held(size_t slot) const { return static_cast<size_t>(keys_[slot]) < all_.n_keys; }

    bool can_spare(int64_t key, int64_t newcomer) const {
        return spare_.empty() || spare_[layer(key)] > 0 || layer(key) == layer(newcomer);
    }

    bool is_before(size_t slot, size_t other) const {
        // Sums that differ by rounding alone are equal.
        const auto one = static_cast<float>(value(slot)), two = static_cast<float>(value(other));
        if (one != two) return one < two;
        return all_.recency[keys_[slot]] < all_.recency[keys_[other]];
    }

    void enter(int64_t newcomer) {
        newest_ = kFree;  // it is the newcomer now, which cannot leave
        if (!spare_.empty()) ++spare_[layer(newcomer)];
    }

    const Residents& all_;
    const int64_t* const keys_;
    const double* const values_;
    int64_t n_free_;
    int64_t newest_;
    std::vector<size_t> taken_;
    std::vector<int64_t> spare_;  // by layer: residents above the floor; empty without one
};

}  // namespace

std::vector<Admitted> admit(const Newcomers& newcomers, const Residents& residents) {
    std::vector<size_t> turns(newcomers.n);
    std::iota(turns.begin(), turns.end(), size_t{0});
    if (newcomers.bids != nullptr) {
        std::stable_sort(turns.begin(), turns.end(), [&](size_t one, size_t other) {
            return newcomers.bids[one] > newcomers.bids[other];
        });
    }
    std::vector<Pool> pools;
    pools.reserve(residents.n_pools);
    for (size_t index = 0; index < residents.n_pools; ++index) pools.emplace_back(residents, index);
    std::vector<Admitted> admitted;
    double left = newcomers.budget_bytes;
    for (const size_t turn : turns) {
        const int64_t key = newcomers.keys[turn];
        Pool* const pool =
            newcomers.pools[turn] == kRoomy ? nullptr : &pools[static_cast<size_t>(newcomers.pools[turn])];
        const bool takes_free = pool == nullptr || pool->has_free();
        size_t slot = kNone;
        if (!takes_free) {
            if (pool->closed) continue;
            slot = pool->first_for(key);
            if (slot == kNone) continue;
            if (newcomers.bids != nullptr && !(newcomers.bids[turn] > pool->value(slot))) {
                pool->closed = true;
                continue;
            }
        }
        if (turn >= newcomers.n_landed) {
            left -= static_cast<double>(newcomers.slot_bytes[turn]);
            if (left < 0) continue;  // and it stays so
        }
        if (takes_free) {
            if (pool != nullptr) pool->take_free(key);
            admitted.push_back({turn, kFree});
        } else {
            pool->take(slot, key);
            admitted.push_back({turn, pool->key(slot)});
        }
    }
    return admitted;
}

}  // namespace vkmoe
