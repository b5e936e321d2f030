// An instruction multiplies 64 codes of a row by as many of a vector, and adds up each four products
// in one of 16 lanes, exactly. What lanes have is multiplied by their block's scales, added up over
// all blocks as floats, and over lanes at last. One of both factors has to be without sign: counted
// from its least value, with the other's sums to make up for it.
#include "vnni.hpp"

#ifdef VKMOE_HAS_VNNI
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "vnni_inputs.hpp"
#endif

namespace vkmoe {

#ifdef VKMOE_HAS_VNNI

namespace {

constexpr size_t kLanes = 16, kPiece = 64, kPieces = QK_K / kPiece;

template <class Value>
__m512i load(const Value* values) {
    return _mm512_loadu_si512(static_cast<const void*>(values));
}

/// Ask for the weights that are a few rows ahead. Processors do so themselves, but not far enough:
/// with this, registers are filled at 0.8 to 0.9 of the speed at which memory can be read.
template <class Block>
void read_ahead(const Block* blocks, size_t n) {
    constexpr size_t kAhead = 4096, kLine = 64;
    const char* const bytes = reinterpret_cast<const char*>(blocks) + kAhead;
    for (size_t i = 0; i < n * sizeof(Block); i += kLine) _mm_prefetch(bytes + i, _MM_HINT_T1);
}

__m128i load_16(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }

/// 32 bytes, twice.
__m512i load_twice(const uint8_t* bytes) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

__m512i every(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }

/// Shifts of 16-bit numbers: of the lower half of a register and of the upper one.
__m512i shifts(short lower, short upper) {
    return _mm512_mask_set1_epi16(_mm512_set1_epi16(lower), 0xFFFF0000, upper);
}

/// low | (high & mask)
__m512i with_bits(__m512i low, __m512i high, int mask) {
    return _mm512_ternarylogic_epi32(low, high, every(mask), 0xF8);
}

float number(ggml_half half) { return _cvtsh_ss(half); }

/// 16 codes of 4 bits each of two blocks: the lower bits of the first, its upper ones, the second's.
__m512i two_nibbles(const uint8_t* first, const uint8_t* second) {
    const __m512i bytes = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load_16(first)),
                                                      0xFF00, load_16(second));
    const __m512i shift = _mm512_maskz_set1_epi16(0xFF00FF00, 4);
    return _mm512_and_si512(_mm512_srlv_epi16(bytes, shift), every(15));
}

/// What a table has for codes of 4 bits.
__m512i looked_up(const int8_t* table, __m512i codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16(table)), codes);
}

// ----- types of 256 weights with a scale of their scales -----

/// A block of weights: codes, and what they count from. A weight is d * scale * code - d_offset *
/// offset, so that sums of the vector's codes are multiplied by offsets.
struct LargeBlock {
    __m512i codes[kPieces], scales[kPieces];  // a lane has the scale of its four codes
    __m512i offsets;
    float d, d_offsets;
};

/// Which of 16 scales each lane of a piece takes.
struct ScaleNumbers {
    alignas(64) int32_t of_piece[kPieces][kLanes];
};

constexpr ScaleNumbers scale_numbers(const LargeLayout& layout) {
    ScaleNumbers found{};
    for (size_t piece = 0; piece < kPieces; ++piece) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
            const size_t column = layout.order[2 * piece + lane / 8] * 32 + lane % 8 * 4;
            found.of_piece[piece][lane] = static_cast<int32_t>(column / layout.per_scale);
        }
    }
    return found;
}

template <class Kind>
void spread(LargeBlock& block, __m512i scales) {
    static constexpr ScaleNumbers kNumbers = scale_numbers(Kind::kLayout);
    for (size_t i = 0; i < kPieces; ++i) {
        block.scales[i] = _mm512_permutexvar_epi32(load(kNumbers.of_piece[i]), scales);
    }
}

/// Six bits of each of eight scales, then of eight minima, which both have a scale.
template <class Kind>
void unpack_scales(const typename Kind::Block& given, LargeBlock& block) {
    const __m128i words = load_16(given.scales);
    const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(words, 0x50), _mm_set_epi32(2, 0, 2, 0));
    const __m128i high = _mm_srlv_epi32(_mm_shuffle_epi32(words, 0xAA), _mm_set_epi32(4, 0, 0, 0));
    const __m128i kept = _mm_and_si128(low, _mm_set_epi32(0x30303030, 0x3F3F3F3F, 0x30303030,
                                                          0x3F3F3F3F));
    const __m128i all = _mm_ternarylogic_epi32(
        kept, high, _mm_set_epi32(0x0F0F0F0F, 0, 0x0F0F0F0F, 0), 0xF8);
    block.offsets = _mm512_cvtepu8_epi32(all);
    spread<Kind>(block, block.offsets);
    block.d = number(given.data.data.d);
    block.d_offsets = number(given.data.data.dmin);
}

struct Q4K {
    using Block = block_q4_K;
    static constexpr const LargeLayout& kLayout = kWithMinima;
    static constexpr bool kFits16Bits = true;  // a sum of four products

    static void unpack(const Block& given, LargeBlock& block) {
        unpack_scales<Q4K>(given, block);
        for (size_t i = 0; i < 2; ++i) {
            const __m512i both = load(given.qs + kPiece * i);
            block.codes[2 * i] = _mm512_and_si512(both, every(15));
            block.codes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), every(15));
        }
    }
};

struct Q5K {
    using Block = block_q5_K;
    static constexpr const LargeLayout& kLayout = kWithMinima;
    static constexpr bool kFits16Bits = true;  // a sum of four products

    static void unpack(const Block& given, LargeBlock& block) {
        unpack_scales<Q5K>(given, block);
        const __m512i upper = load_twice(given.qh);
        const __m512i fifths[kPieces] = {_mm512_sllv_epi16(upper, shifts(4, 2)),
                                         _mm512_sllv_epi16(upper, shifts(3, 1)),
                                         _mm512_srlv_epi16(upper, shifts(0, 2)),
                                         _mm512_srlv_epi16(upper, shifts(1, 3))};
        for (size_t i = 0; i < kPieces; ++i) {
            __m512i codes = load(given.qs + kPiece * (i / 2));
            if (i % 2 != 0) codes = _mm512_srli_epi16(codes, 4);
            block.codes[i] = with_bits(_mm512_and_si512(codes, every(15)), fifths[i], 16);
        }
    }
};

struct Q6K {
    using Block = block_q6_K;
    static constexpr const LargeLayout& kLayout = kOfQ6K;
    static constexpr bool kFits16Bits = true;  // a sum of four products

    static void unpack(const Block& given, LargeBlock& block) {
        block.offsets = _mm512_cvtepi8_epi32(load_16(given.scales));
        block.d = block.d_offsets = number(given.d);
        spread<Q6K>(block, _mm512_and_si512(block.offsets, _mm512_set1_epi32(0xFFFF)));
        for (size_t i = 0; i < 2; ++i) {
            const __m512i both = load(given.ql + kPiece * i), upper = load_twice(given.qh + 32 * i);
            const __m512i low = _mm512_and_si512(both, every(15));
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), every(15));
            block.codes[2 * i] = with_bits(low, _mm512_sllv_epi16(upper, shifts(4, 2)), 0x30);
            block.codes[2 * i + 1] = with_bits(high, _mm512_srlv_epi16(upper, shifts(0, 2)), 0x30);
        }
    }
};

struct Iq4Xs {
    using Block = block_iq4_xs;
    static constexpr const LargeLayout& kLayout = kOfIq4Xs;
    static constexpr bool kFits16Bits = false;  // a sum of four products

    static void unpack(const Block& given, LargeBlock& block) {
        int32_t low;
        std::memcpy(&low, given.scales_l, sizeof low);
        const __m512i of_four = _mm512_srlv_epi32(
            _mm512_set1_epi32(low), _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 28, 24, 20, 16, 12, 8, 4, 0));
        const __m512i of_two = _mm512_sllv_epi32(
            _mm512_srlv_epi32(_mm512_set1_epi32(given.scales_h),
                              _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0)),
            _mm512_set1_epi32(4));
        const __m512i six = _mm512_or_si512(_mm512_and_si512(of_four, _mm512_set1_epi32(15)),
                                            _mm512_and_si512(of_two, _mm512_set1_epi32(0x30)));
        block.offsets = _mm512_sub_epi32(six, _mm512_set1_epi32(32));
        block.d = block.d_offsets = number(given.d);
        spread<Iq4Xs>(block, block.offsets);
        for (size_t i = 0; i < kPieces; ++i) {
            const uint8_t* const codes = given.qs + 32 * i;
            const __m512i values = looked_up(kvalues_iq4nl, two_nibbles(codes, codes + 16));
            block.codes[i] = _mm512_xor_si512(values, every(0x80));  // counted from -128
        }
    }
};

template <class Kind>
void arrange_large(const uint8_t* rounded, size_t n_columns, uint8_t* arranged) {
    constexpr const LargeLayout& kLayout = Kind::kLayout;
    constexpr size_t kPerScale = kLayout.per_scale;
    const auto* const given = reinterpret_cast<const block_q8_K*>(rounded);
    auto* const found = reinterpret_cast<LargeInput*>(arranged);
    for (size_t b = 0; b < n_columns / QK_K; ++b) {
        LargeInput& input = found[b];
        input.d = given[b].d;
        for (size_t i = 0; i < 8; ++i) {
            std::memcpy(input.codes + 32 * i, given[b].qs + 32 * kLayout.order[i], 32);
        }
        std::fill_n(input.sums, kLanes, 0.0F);
        for (size_t i = 0; i < QK_K / kPerScale; ++i) {
            int32_t sum = 0;
            for (size_t j = 0; j < kPerScale / 16; ++j) {
                sum += given[b].bsums[i * kPerScale / 16 + j];
            }
            input.sums[kLayout.first_sum + i] = static_cast<float>(sum) * kLayout.offset;
        }
    }
}

/// Sums of a block's codes times a vector's and their scales.
template <class Kind>
__m512i scaled_sums(const LargeBlock& block, const int8_t* codes) {
    __m512i sums = _mm512_setzero_si512();
    for (size_t i = 0; i < kPieces; ++i) {
        const __m512i of_four =
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), block.codes[i], load(codes + kPiece * i));
        if constexpr (Kind::kFits16Bits) {  // the upper halves of scales are 0
            sums = _mm512_dpwssd_epi32(sums, of_four, block.scales[i]);
        } else {
            sums = _mm512_add_epi32(sums, _mm512_mullo_epi32(of_four, block.scales[i]));
        }
    }
    return sums;
}

template <class Kind, size_t kN>
struct MultiplyLarge {
    static void run(const uint8_t* row, size_t n_columns, const uint8_t* const* vectors,
                    float* products) {
        const auto* const given = reinterpret_cast<const typename Kind::Block*>(row);
        __m512 sums[kN];
        std::fill_n(sums, kN, _mm512_setzero_ps());
        for (size_t b = 0; b < n_columns / QK_K; ++b) {
            read_ahead(given + b, 1);
            LargeBlock block;
            Kind::unpack(given[b], block);
            const __m512 d = _mm512_set1_ps(block.d);
            const __m512 offsets = _mm512_mul_ps(_mm512_cvtepi32_ps(block.offsets),
                                                 _mm512_set1_ps(block.d_offsets));
            for (size_t i = 0; i < kN; ++i) {
                const LargeInput& x = reinterpret_cast<const LargeInput*>(vectors[i])[b];
                const __m512 whole = _mm512_cvtepi32_ps(scaled_sums<Kind>(block, x.codes));
                const __m512 sum = _mm512_mul_ps(whole, d);
                const __m512 counted = _mm512_fnmadd_ps(offsets, _mm512_load_ps(x.sums), sum);
                sums[i] = _mm512_fmadd_ps(counted, _mm512_set1_ps(x.d), sums[i]);
            }
        }
        for (size_t i = 0; i < kN; ++i) products[i] = _mm512_reduce_add_ps(sums[i]);
    }
};

// ----- types of 32 weights with a scale -----

constexpr int kZero = 128;  // the code of a vector's zero

/// 256 columns of a vector: codes without sign, and a scale for each 32 of them. Four codes of a
/// block and four of the next one take turns, so that lanes do.
struct alignas(64) SmallInput {
    uint8_t codes[QK_K];
    float scales[QK_K / QK8_0];
    float sums[QK_K / QK8_0];  // that minima are multiplied by
};

struct Q8 {
    using Block = block_q8_0;

    static __m512i codes(const Block& first, const Block& second) {
        const __m512i low = _mm512_castsi256_si512(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first.qs)));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second.qs));
        return _mm512_inserti64x4(low, high, 1);
    }
};

template <class Given>
struct Q4 {
    using Block = Given;
    static constexpr int kOffset = std::is_same_v<Given, block_q4_0> ? 8 : 0;

    static __m512i codes(const Block& first, const Block& second) {
        return _mm512_sub_epi8(two_nibbles(first.qs, second.qs), every(kOffset));
    }
};

template <class Given>
struct Q5 {
    using Block = Given;
    static constexpr int kOffset = std::is_same_v<Given, block_q5_0> ? 16 : 0;

    static __m512i codes(const Block& first, const Block& second) {
        uint32_t low, high;
        std::memcpy(&low, first.qh, sizeof low);
        std::memcpy(&high, second.qh, sizeof high);
        const __m512i fifths = _mm512_maskz_set1_epi8(static_cast<uint64_t>(high) << 32 | low, 16);
        const __m512i codes = _mm512_or_si512(two_nibbles(first.qs, second.qs), fifths);
        return _mm512_sub_epi8(codes, every(kOffset));
    }
};

struct Iq4Nl {
    using Block = block_iq4_nl;

    static __m512i codes(const Block& first, const Block& second) {
        return looked_up(kvalues_iq4nl, two_nibbles(first.qs, second.qs));
    }
};

struct Mxfp4 {
    using Block = block_mxfp4;

    static __m512i codes(const Block& first, const Block& second) {
        return looked_up(kvalues_mxfp4, two_nibbles(first.qs, second.qs));
    }
};

/// Two numbers that take turns.
__m512 in_turns(ggml_half first, ggml_half second) {
    const int both = second << 16 | first;
    return _mm512_broadcast_f32x2(_mm_cvtph_ps(_mm_cvtsi32_si128(both)));
}

template <class Block>
__m512 scales_of(const Block& first, const Block& second) {
    return in_turns(first.d, second.d);
}

__m512 scales_of(const block_q4_1& first, const block_q4_1& second) {
    return in_turns(first.data.data.d, second.data.data.d);
}

__m512 scales_of(const block_q5_1& first, const block_q5_1& second) {
    return in_turns(first.data.data.d, second.data.data.d);
}

/// 2^(e - 128): the table's values are twice the type's (OCP MX specification 1.0, section 5.4.1).
uint32_t power(uint8_t e) { return e < 2 ? 0x00200000U << e : (e - 1U) << 23; }

__m512 scales_of(const block_mxfp4& first, const block_mxfp4& second) {
    const uint64_t both = static_cast<uint64_t>(power(second.e)) << 32 | power(first.e);
    return _mm512_castsi512_ps(_mm512_set1_epi64(static_cast<int64_t>(both)));
}

template <class Block>
constexpr bool kHasMinima = std::is_same_v<Block, block_q4_1> || std::is_same_v<Block, block_q5_1>;

/// Minima in the first lane of each block, 0 in the others.
template <class Block>
__m512 minima_of(const Block& first, const Block& second) {
    return _mm512_maskz_mov_ps(3, in_turns(first.data.data.m, second.data.data.m));
}

float block_scale(const block_q8_0& block) { return number(block.d); }
float block_scale(const block_q8_1& block) { return number(block.data.data.d); }
float block_sum(const block_q8_0&) { return 0.0F; }
float block_sum(const block_q8_1& block) { return number(block.data.data.s); }

template <class Rounded>
void arrange_small(const uint8_t* rounded, size_t n_columns, uint8_t* arranged) {
    const auto* given = reinterpret_cast<const Rounded*>(rounded);
    auto* const found = reinterpret_cast<SmallInput*>(arranged);
    const size_t n_blocks = n_columns / QK8_0;
    std::fill_n(found, (n_columns + QK_K - 1) / QK_K, SmallInput{});
    for (size_t b = 0; b < n_blocks; ++b) {
        SmallInput& input = found[b / 8];
        const size_t at = b % 8;
        uint8_t* const codes = input.codes + at / 2 * kPiece + at % 2 * 4;
        for (size_t i = 0; i < QK8_0; ++i) {
            codes[i / 4 * 8 + i % 4] = static_cast<uint8_t>(given[b].qs[i] + kZero);
        }
        input.scales[at] = block_scale(given[b]);
        input.sums[at] = block_sum(given[b]);
    }
}

__m512 two_at(const float* values) {
    double both;
    std::memcpy(&both, values, sizeof both);
    return _mm512_castpd_ps(_mm512_set1_pd(both));
}

template <class Kind, size_t kN>
struct MultiplySmall {
    using Block = typename Kind::Block;

    static void run(const uint8_t* row, size_t n_columns, const uint8_t* const* vectors,
                    float* products) {
        const auto* const blocks = reinterpret_cast<const Block*>(row);
        const size_t n_blocks = n_columns / QK8_0;
        __m512 sums[kN];
        std::fill_n(sums, kN, _mm512_setzero_ps());
        for (size_t b = 0; b < n_blocks; b += 2) {
            read_ahead(blocks + b, 2);
            // A last block without a second one takes part twice: the vector has a scale of 0 there.
            const Block &first = blocks[b], &second = blocks[std::min(b + 1, n_blocks - 1)];
            const __m512i codes = _mm512_permutexvar_epi32(turns(), Kind::codes(first, second));
            const __m512i zero = _mm512_setzero_si512();
            const __m512i offset =
                _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, every(kZero), codes));
            const __m512 scales = scales_of(first, second);
            for (size_t i = 0; i < kN; ++i) {
                const SmallInput& x = reinterpret_cast<const SmallInput*>(vectors[i])[b / 8];
                const size_t at = b % 8;
                const __m512 whole = _mm512_cvtepi32_ps(
                    _mm512_dpbusd_epi32(offset, load(x.codes + at / 2 * kPiece), codes));
                const __m512 both = _mm512_mul_ps(scales, two_at(x.scales + at));
                sums[i] = _mm512_fmadd_ps(whole, both, sums[i]);
                if constexpr (kHasMinima<Block>) {
                    const __m512 minima = minima_of(first, second);
                    sums[i] = _mm512_fmadd_ps(minima, two_at(x.sums + at), sums[i]);
                }
            }
        }
        for (size_t i = 0; i < kN; ++i) products[i] = _mm512_reduce_add_ps(sums[i]);
    }

private:
    /// Brings four codes of the first block and four of the second one to take turns.
    static __m512i turns() {
        return _mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    }
};

// ----- all of them -----

/// Multiply by as many vectors at once as there are, while the weights are in registers.
template <template <class, size_t> class Multiply, class Kind>
void multiply_all(const uint8_t* row, size_t n_columns, const uint8_t* const* vectors, size_t n,
                  float* products) {
    for (; n >= 8; n -= 8, vectors += 8, products += 8) {
        Multiply<Kind, 8>::run(row, n_columns, vectors, products);
    }
    for (; n >= 3; n -= 3, vectors += 3, products += 3) {
        Multiply<Kind, 3>::run(row, n_columns, vectors, products);
    }
    if (n == 2) Multiply<Kind, 2>::run(row, n_columns, vectors, products);
    if (n == 1) Multiply<Kind, 1>::run(row, n_columns, vectors, products);
}

template <class Kind>
constexpr VnniKernel kLarge{sizeof(LargeInput), arrange_large<Kind>, multiply_all<MultiplyLarge, Kind>};

template <class Kind, class Rounded = block_q8_0>
constexpr VnniKernel kSmall{sizeof(SmallInput), arrange_small<Rounded>, multiply_all<MultiplySmall, Kind>};

}  // namespace

const VnniKernel* vnni_kernel(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K: return &kLarge<Q4K>;
        case GGML_TYPE_Q5_K: return &kLarge<Q5K>;
        case GGML_TYPE_Q6_K: return &kLarge<Q6K>;
        case GGML_TYPE_IQ4_XS: return &kLarge<Iq4Xs>;
        case GGML_TYPE_Q4_0: return &kSmall<Q4<block_q4_0>>;
        case GGML_TYPE_Q4_1: return &kSmall<Q4<block_q4_1>, block_q8_1>;
        case GGML_TYPE_Q5_0: return &kSmall<Q5<block_q5_0>>;
        case GGML_TYPE_Q5_1: return &kSmall<Q5<block_q5_1>, block_q8_1>;
        case GGML_TYPE_Q8_0: return &kSmall<Q8>;
        case GGML_TYPE_IQ4_NL: return &kSmall<Iq4Nl>;
        case GGML_TYPE_MXFP4: return &kSmall<Mxfp4>;
        default: return nullptr;
    }
}

#else

const VnniKernel* vnni_kernel(ggml_type) { return nullptr; }

#endif

}  // namespace vkmoe
