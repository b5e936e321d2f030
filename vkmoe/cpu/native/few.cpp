// ggml's tiles add up whole numbers block by block, exactly, and then blocks as floats, in order. So
// the same floats come from any way to add up the whole numbers (tiled-kernel.cpp).
#include "few.hpp"

#include <array>
#include <cmath>
#include <cstring>

#define GGML_COMMON_DECL_CPP
#include <ggml-common.h>
#include <ggml.h>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace vkmoe {

#if defined(__AVX2__) && defined(__FMA__)

namespace {

constexpr size_t kPart = 32;  // weights that are multiplied at once

/// A block of 256 weights: code * scale, less 32 * scale or a minimum, of 16 or 32 weights each.
struct Block {
    alignas(32) uint8_t codes[QK_K];
    alignas(32) int16_t scales[QK_K / 2];   // of pairs of codes
    alignas(32) int32_t offsets[QK_K / 16];  // what 16 values of the vector are multiplied by
    float d, d_offsets;
};

__m256i load(const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

void store(void* target, __m256i values) {
    _mm256_store_si256(static_cast<__m256i*>(target), values);
}

__m256i low_bits(__m256i values, int shift, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(values, shift),
                            _mm256_set1_epi8(static_cast<char>(mask)));
}

__m256i higher_bits(__m256i values, int shift, int mask) {
    return _mm256_slli_epi16(low_bits(values, shift, mask), 4);
}

float number(ggml_half half) {
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    return ggml_fp16_to_fp32(half);
#endif
}

/// Six bits of each of eight scales, then of eight minima (ggml-common.h, block_q4_K).
void unpack_scales(const uint8_t* packed, Block& block) {
    std::array<uint32_t, 3> words;
    std::memcpy(words.data(), packed, sizeof words);
    constexpr uint32_t kLow = 0x0F0F0F0F, kHigh = 0x03030303, kSix = 0x3F3F3F3F;
    const std::array<uint32_t, 4> found{
        words[0] & kSix, (words[2] & kLow) | (words[0] >> 6 & kHigh) << 4,
        words[1] & kSix, (words[2] >> 4 & kLow) | (words[1] >> 6 & kHigh) << 4};
    std::array<uint8_t, 16> each;
    std::memcpy(each.data(), found.data(), sizeof each);
    for (size_t s = 0; s < 8; ++s) store(block.scales + 16 * s, _mm256_set1_epi16(each[s]));
    const __m128i minima = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(each.data() + 8));
    const __m128i twice = _mm_unpacklo_epi8(minima, minima);
    store(block.offsets, _mm256_cvtepu8_epi32(twice));
    store(block.offsets + 8, _mm256_cvtepu8_epi32(_mm_srli_si128(twice, 8)));
}

void unpack(const block_q4_K& given, Block& block) {
    block.d = number(given.data.data.d);
    block.d_offsets = number(given.data.data.dmin);
    unpack_scales(given.scales, block);
    for (size_t i = 0; i < 4; ++i) {
        const __m256i both = load(given.qs + 32 * i);
        store(block.codes + 64 * i, low_bits(both, 0, 15));
        store(block.codes + 64 * i + 32, low_bits(both, 4, 15));
    }
}

void unpack(const block_q5_K& given, Block& block) {
    block.d = number(given.data.data.d);
    block.d_offsets = number(given.data.data.dmin);
    unpack_scales(given.scales, block);
    const __m256i upper = load(given.qh);
    for (int i = 0; i < 4; ++i) {
        const __m256i both = load(given.qs + 32 * i);
        store(block.codes + 64 * i,
              _mm256_or_si256(low_bits(both, 0, 15), higher_bits(upper, 2 * i, 1)));
        store(block.codes + 64 * i + 32,
              _mm256_or_si256(low_bits(both, 4, 15), higher_bits(upper, 2 * i + 1, 1)));
    }
}

void unpack(const block_q6_K& given, Block& block) {
    block.d = number(given.d);
    block.d_offsets = 0.0F;
    for (size_t s = 0; s < 16; s += 2) {
        store(block.scales + 8 * s, _mm256_set_m128i(_mm_set1_epi16(given.scales[s + 1]),
                                                     _mm_set1_epi16(given.scales[s])));
    }
    const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(given.scales));
    store(block.offsets, _mm256_slli_epi32(_mm256_cvtepi8_epi32(scales), 5));
    store(block.offsets + 8,
          _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_srli_si128(scales, 8)), 5));
    for (size_t half = 0; half < 2; ++half) {
        const __m256i first = load(given.ql + 64 * half), second = load(given.ql + 64 * half + 32);
        const __m256i upper = load(given.qh + 32 * half);
        uint8_t* const codes = block.codes + 128 * half;
        store(codes, _mm256_or_si256(low_bits(first, 0, 15), higher_bits(upper, 0, 3)));
        store(codes + 32, _mm256_or_si256(low_bits(second, 0, 15), higher_bits(upper, 2, 3)));
        store(codes + 64, _mm256_or_si256(low_bits(first, 4, 15), higher_bits(upper, 4, 3)));
        store(codes + 96, _mm256_or_si256(low_bits(second, 4, 15), higher_bits(upper, 6, 3)));
    }
}

int32_t total(__m256i lanes) {
    const __m128i four =
        _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}

/// Add the product of a block and a part of a vector to a sum, rounded as ggml's tiles do it.
template <bool kHasMinima, bool kIsFused>
float added(float sum, const Block& block, const block_q8_K& x) {
    __m256i products = _mm256_setzero_si256(), offsets = _mm256_setzero_si256();
    for (size_t i = 0; i < QK_K; i += kPart) {
        const __m256i codes = load(block.codes + i);
        const __m256i values = load(reinterpret_cast<const uint8_t*>(x.qs + i));
        const __m256i scales = load(reinterpret_cast<const uint8_t*>(block.scales + i / 2));
        products = _mm256_add_epi32(
            products, _mm256_madd_epi16(scales, _mm256_maddubs_epi16(codes, values)));
    }
    for (size_t i = 0; i < 2; ++i) {
        const __m128i sums = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x.bsums + 8 * i));
        const __m256i of_eight = load(reinterpret_cast<const uint8_t*>(block.offsets + 8 * i));
        offsets = _mm256_add_epi32(offsets,
                                   _mm256_mullo_epi32(of_eight, _mm256_cvtepi16_epi32(sums)));
    }
    float product;
    if (kHasMinima) {
        const float scaled = static_cast<float>(total(products)) * block.d;
        product = std::fma(-block.d_offsets, static_cast<float>(total(offsets)), scaled);
    } else {
        product = static_cast<float>(total(_mm256_sub_epi32(products, offsets))) * block.d;
    }
    return kIsFused ? std::fma(product, x.d, sum) : sum + product * x.d;
}

template <class GivenBlock, bool kHasMinima, bool kIsFused>
void multiply_rows(const uint8_t* weights, size_t row_bytes, size_t n_rows, const Inputs& inputs,
                   const uint32_t* vectors, size_t n_vectors, Products& products) {
    const size_t n_blocks = inputs.n_columns() / QK_K;
    std::array<const block_q8_K*, kFewVectors> x;
    for (size_t i = 0; i < n_vectors; ++i) {
        x[i] = reinterpret_cast<const block_q8_K*>(inputs.at(vectors[i]));
    }
    for (size_t row = 0; row < n_rows; ++row) {
        const auto* const given = reinterpret_cast<const GivenBlock*>(weights + row * row_bytes);
        std::array<float, kFewVectors> sums{};
        for (size_t b = 0; b < n_blocks; ++b) {
            Block block;
            unpack(given[b], block);
            for (size_t i = 0; i < n_vectors; ++i) {
                sums[i] = added<kHasMinima, kIsFused>(sums[i], block, x[i][b]);
            }
        }
        for (size_t i = 0; i < n_vectors; ++i) products.of(i)[row] = sums[i];
    }
}

}  // namespace

size_t few_vectors(const Format& format) {
    if (format.type == GGML_TYPE_Q6_K) return kFewVectors;  // tiles take long to unpack it
    return format.type == GGML_TYPE_Q4_K || format.type == GGML_TYPE_Q5_K ? kFewVectors / 2 : 0;
}

bool multiply_few(Rounding rounding, const uint8_t* weights, size_t row_bytes, size_t n_rows,
                  const Inputs& inputs, const uint32_t* vectors, size_t n_vectors,
                  Products& products) {
    const bool fused = rounding == Rounding::kOnce;
    const auto run = [&](auto multiply) {
        multiply(weights, row_bytes, n_rows, inputs, vectors, n_vectors, products);
        return true;
    };
    switch (inputs.format().type) {
        case GGML_TYPE_Q4_K: return fused ? run(multiply_rows<block_q4_K, true, true>)
                                         : run(multiply_rows<block_q4_K, true, false>);
        case GGML_TYPE_Q5_K: return fused ? run(multiply_rows<block_q5_K, true, true>)
                                         : run(multiply_rows<block_q5_K, true, false>);
        case GGML_TYPE_Q6_K: return fused ? run(multiply_rows<block_q6_K, false, true>)
                                         : run(multiply_rows<block_q6_K, false, false>);
        default: return false;
    }
}

#else

size_t few_vectors(const Format&) { return 0; }

bool multiply_few(Rounding, const uint8_t*, size_t, size_t, const Inputs&, const uint32_t*, size_t,
                  Products&) {
    return false;
}

#endif

}  // namespace vkmoe
