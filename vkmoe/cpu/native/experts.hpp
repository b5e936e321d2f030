// What the kernels of experts have in common, those of decoded rows and those of prompts.
#pragma once

#include <algorithm>
#include <cmath>
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

/// What joins the products of gate and up: silu, or that of gpt-oss.
inline float activated(float gate, float up, size_t activation) {
    if (activation == 0) return gate / (1.0F + std::exp(-gate)) * up;
    const float g = std::min(gate, 7.0F);
    return g / (1.0F + std::exp(-1.702F * g)) * (std::clamp(up, -7.0F, 7.0F) + 1.0F);
}

}  // namespace vkmoe
