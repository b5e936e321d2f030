#include "copies.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "turn.hpp"

namespace vkmoe {

std::vector<int64_t> able(const Slots& slots, const std::vector<int64_t>& last,
                          int64_t oldest_read) {
    std::vector<int64_t> found;
    const auto can_begin = [&](int64_t key) {
        return slots.state[key] == kWaiting && slots.last_mapped[slots.slot_of[key]] < oldest_read &&
               (slots.readable == nullptr || slots.readable[key] == kPresent);
    };
    const uint8_t* const end = slots.state + slots.n_keys;
    const auto next = [=](const uint8_t* from) {  // far faster than one by one: few wait
        return from == end ? nullptr : static_cast<const uint8_t*>(std::memchr(from, kWaiting, end - from));
    };
    for (const uint8_t* at = next(slots.state); at != nullptr; at = next(at + 1)) {
        const int64_t key = at - slots.state;
        const bool is_last = std::find(last.begin(), last.end(), key) != last.end();
        if (!is_last && can_begin(key)) found.push_back(key);
    }
    std::copy_if(last.begin(), last.end(), std::back_inserter(found), can_begin);
    return found;
}

}  // namespace vkmoe
