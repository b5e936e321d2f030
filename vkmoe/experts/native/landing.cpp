#include "landing.hpp"

#include <utility>

#include "turn.hpp"

namespace vkmoe {

int64_t land(const Places& places, const Landing& landing, int64_t key, int64_t index) {
    const auto layer = static_cast<size_t>(key) / places.n_experts;
    const size_t number = layer * landing.n_landing + static_cast<size_t>(index);
    std::swap(landing.slots[number], places.slot_of[key]);
    places.state[key] = kPresent;
    places.changed[key] = true;
    places.holders[places.entry_of[landing.slots[number]]] = static_cast<int64_t>(places.n_keys);
    places.holders[places.entry_of[places.slot_of[key]]] = key;
    return static_cast<int64_t>(number);
}

std::vector<int64_t> offer(const Landing& landing, const int64_t* last_mapped,
                           const uint64_t* addresses, int64_t oldest_read, uint64_t* offered,
                           size_t n_offered, std::vector<int64_t>& waiting) {
    std::vector<int64_t> written, later;
    for (const int64_t number : waiting) {
        const int64_t slot = landing.slots[number];
        const auto n = static_cast<size_t>(number);
        const size_t entry = n / landing.n_landing * n_offered + n % landing.n_landing;
        const bool is_able = last_mapped[slot] < oldest_read;
        offered[entry] = is_able ? addresses[slot] : kNowhere;
        written.push_back(static_cast<int64_t>(entry));
        if (!is_able) later.push_back(number);
    }
    waiting = std::move(later);
    return written;
}

}  // namespace vkmoe
