// Copies into slots that can begin: what moves are about, and which slots no submit reads any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vkmoe {

/// The record of places, and since when slots are no longer read.
struct Slots {
    const uint8_t* state;    // [n_keys]
    const int64_t* slot_of;  // [n_keys]
    int64_t* last_mapped;    // by slot: the last version that led to it
    const uint8_t* readable; // [n_keys]: states; only what is present there can be copied; null: all
    size_t n_keys;
};

/// The experts whose copies wait and can begin, into slots that a submit of `oldest_read` or later
/// does not read: by key, but those of `last` at the end, in that order.
std::vector<int64_t> able(const Slots& slots, const std::vector<int64_t>& last,
                          int64_t oldest_read);

}  // namespace vkmoe
