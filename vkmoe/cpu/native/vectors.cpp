#include "vectors.hpp"

#include <algorithm>
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

/// As many floats, in as many registers as the processor needs for them.
using Lanes [[gnu::vector_size(kLanes * sizeof(float)), gnu::aligned(alignof(float)), gnu::may_alias]] =
    float;

#define VKMOE_INLINE inline __attribute__((always_inline))  // a part of what is compiled for each

VKMOE_INLINE const Lanes& lanes_at(const float* values) {
    return *reinterpret_cast<const Lanes*>(values);
}

VKMOE_INLINE Lanes& lanes_at(float* values) { return *reinterpret_cast<Lanes*>(values); }

using Eight [[gnu::vector_size(8 * sizeof(float))]] = float;
using Four [[gnu::vector_size(4 * sizeof(float))]] = float;

/// The sum of both halves.
template <class Whole, class Half>
VKMOE_INLINE void fold(const Whole& lanes, Half& found) {
    Half halves[2];
    static_assert(sizeof halves == sizeof lanes);
    std::memcpy(halves, &lanes, sizeof halves);
    found = halves[0] + halves[1];
}

VKMOE_INLINE float total(const Lanes& lanes) {
    Eight eight;
    Four four;
    fold(lanes, eight);
    fold(eight, four);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/// Lanes of two registers: those of the second begin with 16.
template <int... kNumbers>
VKMOE_INLINE void choose(const Lanes& one, const Lanes& other, Lanes& found) {
#ifdef __clang__
    found = __builtin_shufflevector(one, other, kNumbers...);
#else
    using Numbers [[gnu::vector_size(kLanes * sizeof(int))]] = int;
    found = __builtin_shuffle(one, other, Numbers{kNumbers...});
#endif
}

/// The sums of lanes of four registers, each added up as by `total`.
VKMOE_INLINE void four_totals(const Lanes (&lanes)[4], float* found) {
    Lanes eights[2], lower, upper;  // eight lanes of two sums, then four of four
    for (size_t i = 0; i < 2; ++i) {
        const Lanes &one = lanes[2 * i], &other = lanes[2 * i + 1];
        choose<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(one, other, lower);
        choose<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(one, other, upper);
        eights[i] = lower + upper;
    }
    choose<0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27>(eights[0], eights[1], lower);
    choose<4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31>(eights[0], eights[1], upper);
    Eight eight;
    Four four;
    fold(lower + upper, eight);
    fold(eight, four);
    std::memcpy(found, &four, sizeof four);
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

namespace {

/// For kParts registers of each sum, from `first` on.
template <size_t kN, size_t kParts>
VKMOE_INLINE void add_part(float* sums, const float* factors, size_t pitch,
                           const float* const* values, size_t n_factors, size_t n, size_t first) {
    Lanes lanes[kN][kParts];
    for (size_t k = 0; k < kN; ++k) {
        for (size_t part = 0; part < kParts; ++part) {
            lanes[k][part] = lanes_at(sums + k * n + first + part * kLanes);
        }
    }
    for (size_t i = 0; i < n_factors; ++i) {
        for (size_t part = 0; part < kParts; ++part) {
            const Lanes value = lanes_at(values[i] + first + part * kLanes);
            for (size_t k = 0; k < kN; ++k) {
                lanes[k][part] += factors[k * pitch + i] * value;
            }
        }
    }
    for (size_t k = 0; k < kN; ++k) {
        for (size_t part = 0; part < kParts; ++part) {
            lanes_at(sums + k * n + first + part * kLanes) = lanes[k][part];
        }
    }
}

template <size_t kN>
VKMOE_INLINE void add_all_of(float* sums, const float* factors, size_t pitch,
                             const float* const* values, size_t n_factors, size_t n) {
    size_t first = 0;
    for (; first + 2 * kLanes <= n; first += 2 * kLanes) {
        add_part<kN, 2>(sums, factors, pitch, values, n_factors, n, first);
    }
    for (; first + kLanes <= n; first += kLanes) {
        add_part<kN, 1>(sums, factors, pitch, values, n_factors, n, first);
    }
    for (; first < n; ++first) {
        for (size_t k = 0; k < kN; ++k) {
            for (size_t i = 0; i < n_factors; ++i) {
                sums[k * n + first] += factors[k * pitch + i] * values[i][first];
            }
        }
    }
}

}  // namespace

VKMOE_FOR_EACH_PROCESSOR
float dot(const float* one, const float* other, size_t n) {
    Lanes sums = {};
    size_t first = 0;
    for (; first + kLanes <= n; first += kLanes) {
        sums += lanes_at(one + first) * lanes_at(other + first);
    }
    for (size_t i = 0; first + i < n; ++i) sums[i] += one[first + i] * other[first + i];
    return total(sums);
}

VKMOE_FOR_EACH_PROCESSOR
void products(const float* ones, size_t n_ones, const float* const* others, size_t n_others,
              size_t n, float* found, size_t pitch) {
    for (size_t begin = 0; begin < n_others; begin += 4) {
        const float* given[4];
        for (size_t i = 0; i < 4; ++i) given[i] = others[std::min(begin + i, n_others - 1)];
        for (size_t k = 0; k < n_ones; ++k) {
            const float* const one = ones + k * n;
            Lanes sums[4] = {};
            size_t first = 0;
            for (; first + kLanes <= n; first += kLanes) {
                const Lanes values = lanes_at(one + first);
                for (size_t i = 0; i < 4; ++i) sums[i] += values * lanes_at(given[i] + first);
            }
            for (; first < n; ++first) {
                for (size_t i = 0; i < 4; ++i) sums[i][first % kLanes] += one[first] * given[i][first];
            }
            four_totals(sums, found + k * pitch + begin);
        }
    }
}

VKMOE_FOR_EACH_PROCESSOR
void add_all_scaled(float* sums, size_t n_sums, const float* factors, size_t pitch,
                    const float* const* values, size_t n_factors, size_t n) {
    for (; n_sums >= 4; n_sums -= 4, sums += 4 * n, factors += 4 * pitch) {
        add_all_of<4>(sums, factors, pitch, values, n_factors, n);
    }
    for (; n_sums > 0; --n_sums, sums += n, factors += pitch) {
        add_all_of<1>(sums, factors, pitch, values, n_factors, n);
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
    Lanes most = {};
    most += least;
    size_t first = 0;
    for (; first + kLanes <= n; first += kLanes) {
        const Lanes given = lanes_at(values + first);
        most = given > most ? given : most;
    }
    for (size_t i = 0; first + i < n; ++i) {
        most[i] = values[first + i] > most[i] ? values[first + i] : most[i];
    }
    for (size_t i = 0; i < kLanes; ++i) least = most[i] > least ? most[i] : least;
    return least;
}

VKMOE_FOR_EACH_PROCESSOR
float exponentials(float* __restrict values, size_t n, float top) {
    for (size_t i = 0; i < n; ++i) values[i] = exponential(values[i] - top);
    Lanes sums = {};
    size_t first = 0;
    for (; first + kLanes <= n; first += kLanes) sums += lanes_at(values + first);
    for (size_t i = 0; first + i < n; ++i) sums[i] += values[first + i];
    return total(sums);
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
