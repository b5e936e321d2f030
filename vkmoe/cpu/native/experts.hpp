// What the kernels of experts have in common, those of decoded rows and those of prompts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace vkmoe {

constexpr size_t kBoth = 0, kGateOnly = 1, kUpOnly = 2;  // passes, as ops/experts.py has them

/// What is at the address that stands so many bytes behind an expert's own.
template <class Item>
const Item* part(const uint8_t* expert, size_t offset) {
    uint64_t address;
    std::memcpy(&address, expert + offset, sizeof address);
    return reinterpret_cast<const Item*>(address);
}

}  // namespace vkmoe
