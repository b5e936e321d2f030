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

/// Where the bytes of an expert's gate, up and down stand behind its addresses, if they are in a file
/// that memory does not hold as a whole; else 0.
constexpr size_t kSizesAt = 6 * sizeof(uint64_t);

/// Where the scales of an expert's gate, up and down stand behind those: floats.
constexpr size_t kScalesAt = 9 * sizeof(uint64_t);

/// What the weights are multiplied by of the matrix whose address stands so many bytes behind an
/// expert's own.
inline float scale_of(const uint8_t* expert, size_t offset) {
    float scale;
    std::memcpy(&scale, expert + kScalesAt + offset / sizeof(uint64_t) * sizeof scale, sizeof scale);
    return scale;
}

/// Ask the system to read an expert's matrices from the file, all that lack at once. Page faults would
/// read them one by one, each with megabytes of its neighbours.
void read_ahead(const uint8_t* expert);

/// How often the system was asked for an expert, since the start.
uint64_t n_read_ahead();

}  // namespace vkmoe
