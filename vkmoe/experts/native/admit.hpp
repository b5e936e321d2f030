// Which newcomers get slots, and which experts leave for them: a choice by ranks and bids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vkmoe {

constexpr int64_t kFree = -1;  // in place of a key: a slot that no expert has
constexpr int64_t kRoomy = -1; // in place of a pool: one with a free slot for each newcomer

/// Those that want slots, in order of their claim where they do not bid.
struct Newcomers {
    const int64_t* keys;
    const double* bids;  // the highest first, each above the value of its victim; null: all enter
    const int64_t* pools;  // of those below, or kRoomy
    const int64_t* slot_bytes;
    size_t n;
    size_t n_landed;      // the first so many need no copy
    double budget_bytes;  // of the copies of the others
};

/// The slots of some pools, and what orders the experts in them.
struct Residents {
    const int64_t* keys;   // [pool, slot]: n_keys where a slot has none, or is to land in
    const double* values;  // [pool, slot]: the lowest leaves first; of equals the least recent
    const double* worth;   // [n_keys]: the same by key, where there are no values
    const int64_t* n_free;  // [pool]
    const int64_t* newest;  // [pool]: leaves only if no other may
    const int64_t* floors;  // [pool]: residents that a layer keeps, but for its own
    size_t n_pools;
    size_t n_slots;

    const bool* may_leave;   // [n_keys + 1]: without a pin
    const bool* needed;      // [n_keys]: may not leave
    const int32_t* recency;  // [n_keys + 1], no two alike
    size_t n_keys;
    size_t n_experts;  // of a layer
};

/// A newcomer by its index, and whose slot it gets: a key, or kFree.
struct Admitted {
    size_t newcomer;
    int64_t victim;
};

/// Those that get slots, in turn. No newcomer leaves again.
std::vector<Admitted> admit(const Newcomers& newcomers, const Residents& residents);

}  // namespace vkmoe
