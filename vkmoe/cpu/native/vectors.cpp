#include "vectors.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// Without fused multiply-add: the same bits whatever the processor has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VKMOE_FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VKMOE_FOR_EACH_PROCESSOR
#endif

namespace vkmoe {

namespace {

constexpr size_t kLanes = 16;  // that are added up side by side
constexpr float kLargest = std::numeric_limits<float>::max();

inline float total(std::array<float, kLanes> lanes) {
    for (size_t n = kLanes / 2; n > 0; n /= 2) {
        for (size_t i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    }
    return lanes[0];
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
void fade(const float* values, float factor, size_t n, float* found) {
    for (size_t i = 0; i < n; ++i) found[i] = factor * values[i];
}

VKMOE_FOR_EACH_PROCESSOR
void gate(float* __restrict values, const float* __restrict gates, size_t n, bool is_silu) {
    for (size_t i = 0; i < n; ++i) {
        const float g = gates[i], fading = exponential(g < 0.0F ? g : -g);
        values[i] *= (is_silu ? g : 1.0F) * ((g < 0.0F ? fading : 1.0F) / (1.0F + fading));
    }
}

VKMOE_FOR_EACH_PROCESSOR
void scale_quants(const int8_t* __restrict bytes, float factor, size_t n,
                    float* __restrict found) {
    for (size_t i = 0; i < n; ++i) found[i] = factor * static_cast<float>(bytes[i]);
}

VKMOE_FOR_EACH_PROCESSOR
void scale_nibbles(const uint8_t* __restrict packed, const uint8_t* __restrict fifth_bits,
                   float factor, float offset, size_t n, float* __restrict found) {
    for (size_t i = 0; i < n; i += 8) {
        uint32_t word, bits = 0;
        std::memcpy(&word, packed + i / 2, sizeof(word));
        if (fifth_bits != nullptr) {
            std::memcpy(&bits, fifth_bits, sizeof(bits));
            bits >>= i / 4;
        }
        const uint32_t low = (word & 0x0F0F0F0F) | (bits << 4 & 0x10101010);
        const uint32_t high = (word >> 4 & 0x0F0F0F0F) | (bits << 3 & 0x10101010);
        for (size_t j = 0; j < 4; ++j) {
            found[i + j] = factor * static_cast<float>(low >> 8 * j & 0xFF) + offset;
            found[i + 4 + j] = factor * static_cast<float>(high >> 8 * j & 0xFF) + offset;
        }
    }
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
void products_of_block(const float* __restrict one, const float* __restrict turned, size_t n,
                       float* __restrict products) {
    std::array<float, kBlockVectors> sums{};
    for (size_t i = 0; i < n; ++i) {
        for (size_t k = 0; k < kBlockVectors; ++k) sums[k] += one[i] * turned[i * kBlockVectors + k];
    }
    std::copy(sums.begin(), sums.end(), products);
}

VKMOE_FOR_EACH_PROCESSOR
void add_all_scaled(float* __restrict sum, const float* __restrict factors,
                    const float* const* __restrict values, size_t n_factors, size_t n) {
    size_t first = 0;
    for (; first + kLanes <= n; first += kLanes) {
        std::array<float, kLanes> lanes;
        for (size_t i = 0; i < kLanes; ++i) lanes[i] = sum[first + i];
        for (size_t k = 0; k < n_factors; ++k) {
            for (size_t i = 0; i < kLanes; ++i) lanes[i] += factors[k] * values[k][first + i];
        }
        for (size_t i = 0; i < kLanes; ++i) sum[first + i] = lanes[i];
    }
    for (; first < n; ++first) {
        for (size_t k = 0; k < n_factors; ++k) sum[first] += factors[k] * values[k][first];
    }
}

VKMOE_FOR_EACH_PROCESSOR
void soft_cap(float* values, size_t n, float cap) {
    for (size_t i = 0; i < n; ++i) {  // soft_cap.comp says why
        const float value = values[i], whole = std::fabs(value) / cap;
        const float size = whole > 10.0F ? 10.0F : whole;  // NaN stays what it is
        const float square = size * size;
        const float fading = exponential(-2.0F * size);
        float series = -5.70498872745e-3F;
        series = series * square + 2.06390887954e-2F;
        series = series * square - 5.37397155531e-2F;
        series = series * square + 1.33314422036e-1F;
        series = series * square - 3.33332819422e-1F;
        series = series * square * size + size;
        const float far = (1.0F - fading) / (1.0F + fading);
        const float is_far = size > 0.625F ? 1.0F : 0.0F;  // GCC makes a branch of a choice
        values[i] = std::copysign(cap, value) * (is_far * far + (1.0F - is_far) * series);
    }
}

VKMOE_FOR_EACH_PROCESSOR
bool make_finite(const float* __restrict values, size_t n, float* __restrict found) {
    uint32_t n_nan = 0;
    for (size_t i = 0; i < n; ++i) {
        const float value = values[i];
        n_nan += value != value ? 1 : 0;
        const float at_least = value > -kLargest ? value : -kLargest;  // also for NaN
        found[i] = at_least < kLargest ? at_least : kLargest;
    }
    return n_nan != 0;
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

namespace {

VKMOE_FOR_EACH_PROCESSOR
void swiglu(float* __restrict gates, const float* __restrict ups, size_t n, bool clamped) {
    const float slope = clamped ? 1.702F : 1.0F, most = clamped ? 7.0F : kLargest;
    const float added = clamped ? 1.0F : 0.0F;
    for (size_t i = 0; i < n; ++i) {
        const float g = gates[i] > most ? most : gates[i];  // NaN stays what it is
        const float u = ups[i] > most ? most : ups[i] < -most ? -most : ups[i];
        const float turned = slope * g, fading = exponential(turned < 0.0F ? turned : -turned);
        gates[i] = g * ((turned < 0.0F ? fading : 1.0F) / (1.0F + fading)) * (u + added);
    }
}

VKMOE_FOR_EACH_PROCESSOR
void geglu(float* __restrict gates, const float* __restrict ups, size_t n) {
    constexpr float kSlope = 1.5957691216F, kCurve = 0.0713548163F, kEnd = 10.0F;  // activation.glsl
    for (size_t i = 0; i < n; ++i) {
        const float g = gates[i] < -kEnd ? -kEnd : gates[i];  // NaN stays what it is
        const float cut = g > kEnd ? kEnd : g, turned = cut * (kSlope + kCurve * cut * cut);
        const float fading = exponential(turned < 0.0F ? turned : -turned);
        gates[i] = g * ((turned < 0.0F ? fading : 1.0F) / (1.0F + fading)) * ups[i];
    }
}

}  // namespace

void activate(float* gates, const float* ups, size_t n, Activation activation) {
    if (activation == Activation::geglu) return geglu(gates, ups, n);
    swiglu(gates, ups, n, activation == Activation::clamped);
}

}  // namespace vkmoe
