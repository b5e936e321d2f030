#include "vectors.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

// Without fused multiply-add: the same bits whatever the processor has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VKMOE_FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VKMOE_FOR_EACH_PROCESSOR
#endif

namespace vkmoe {

namespace {

constexpr size_t kLanes = 16;  // that are added up side by side

float total(const std::array<float, kLanes>& lanes) {
    float sum = 0.0F;
    for (const float lane : lanes) sum += lane;
    return sum;
}

/// e^x for x from -87 to 0, to 2 units in the last place: 2^n e^r with |r| <= ln(2) / 2, e^r by its
/// series (Cephes, expf).
inline float exponential(float x) {
    x = std::max(x, -87.0F);
    const float n = x * 1.44269504F - 0.5F;
    const auto whole = static_cast<int32_t>(n);  // towards zero: x is not above it
    const auto turns = static_cast<float>(whole);
    const float r = (x - turns * 0.693359375F) + turns * 2.12194440e-4F;
    float series = 1.9875691500e-4F;
    series = series * r + 1.3981999507e-3F;
    series = series * r + 8.3334519073e-3F;
    series = series * r + 4.1665795894e-2F;
    series = series * r + 1.6666665459e-1F;
    series = series * r + 5.0000001201e-1F;
    series = series * (r * r) + r + 1.0F;
    const int32_t bits = (whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return series * power;
}

}  // namespace

VKMOE_FOR_EACH_PROCESSOR
void add_scaled(float* __restrict sum, float factor, const float* __restrict values, size_t n) {
    for (size_t i = 0; i < n; ++i) sum[i] += factor * values[i];
}

VKMOE_FOR_EACH_PROCESSOR
float dot(const float* __restrict one, const float* __restrict other, size_t n) {
    std::array<float, kLanes> lanes{};
    size_t first = 0;
    for (; first + kLanes <= n; first += kLanes) {
        for (size_t i = 0; i < kLanes; ++i) lanes[i] += one[first + i] * other[first + i];
    }
    for (size_t i = 0; first + i < n; ++i) lanes[i] += one[first + i] * other[first + i];
    return total(lanes);
}

VKMOE_FOR_EACH_PROCESSOR
float largest(const float* values, size_t n, float least) {
    for (size_t i = 0; i < n; ++i) least = values[i] > least ? values[i] : least;
    return least;
}

VKMOE_FOR_EACH_PROCESSOR
float exponentials(float* __restrict values, size_t n, float top) {
    for (size_t i = 0; i < n; ++i) values[i] = exponential(values[i] - top);
    std::array<float, kLanes> lanes{};
    size_t first = 0;
    for (; first + kLanes <= n; first += kLanes) {
        for (size_t i = 0; i < kLanes; ++i) lanes[i] += values[first + i];
    }
    for (size_t i = 0; first + i < n; ++i) lanes[i] += values[first + i];
    return total(lanes);
}

}  // namespace vkmoe
