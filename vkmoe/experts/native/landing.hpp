// Slots to land in: what was stored there while it was read at home may stay, and its layer gets
// another slot to land in, which is offered once no submit reads it any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vkmoe {

constexpr uint64_t kNowhere = 0;  // in place of an address

/// The slots to land in of all layers, one row of `n_landing` for each.
struct Landing {
    int64_t* slots;
    size_t n_landing;
};

/// The record of places, as far as landing changes it.
struct Places {
    uint8_t* state;           // [n_keys]
    int64_t* slot_of;         // [n_keys]
    bool* changed;            // [n_keys]
    const int64_t* entry_of;  // by slot
    int64_t* holders;         // by entry
    size_t n_keys, n_experts;
};

/// An expert keeps the slot to land in that it is in, the index-th of its layer, and gives it its
/// own. Returns which of all such slots that is now.
int64_t land(const Places& places, const Landing& landing, int64_t key, int64_t index);

/// Offers those of the slots that are waiting, by number, that no submit reads any more: it reads no
/// version before `oldest_read`, and `last_mapped` is the last one that led to each slot. Its
/// address goes into `offered` [n_layers, n_offered]. The others are offered to none, and stay.
/// Returns the entries that were written.
std::vector<int64_t> offer(const Landing& landing, const int64_t* last_mapped,
                           const uint64_t* addresses, int64_t oldest_read, uint64_t* offered,
                           size_t n_offered, std::vector<int64_t>& waiting);

}  // namespace vkmoe
