// Products of 32 rows of weights and many vectors: each lane of two registers is one of the rows. 256
// columns are unpacked once, so that a lane has four codes of its row, and multiplied by all vectors
// while the nearest cache has them. Four codes of a vector go to all lanes; an instruction adds up
// their products with those of 16 rows, exactly, until the next scale.
#include "vnni.hpp"

#ifdef VKMOE_HAS_VNNI
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "products.hpp"
#include "vnni_inputs.hpp"
#endif

namespace vkmoe {

#ifdef VKMOE_HAS_VNNI

namespace {

constexpr size_t kLanes = 16, kHalves = 2, kRows = kHalves * kLanes;
constexpr size_t kFours = QK_K / 4;  // of a row's columns
static_assert(kTileRows % kRows == 0);

/// 256 columns of 32 rows, unpacked. A weight is scale * code - minimum; of types without minima the
/// vector's sums make up for what codes count from.
struct Piece {
    __m512i codes[kFours][kHalves];  // a lane has four of its row
    __m512 scales[QK_K / 16][kHalves], minima[QK_K / 32][kHalves];
};

/// 16 rows; behind the last one of a matrix it is taken again.
class Rows {
public:
    Rows(const uint8_t* first, size_t row_bytes, size_t n) : at_(first) {
        for (size_t i = 0; i < kLanes; ++i) {
            offsets_[i] = static_cast<int32_t>(std::min(i, n - 1) * row_bytes);
        }
    }

    /// Go on to the next block of each row.
    void advance(size_t bytes) { at_ += bytes; }

    /// Ask for the next block of each row.
    void read_ahead(size_t bytes) const {
        constexpr size_t kLine = 64;
        for (const int32_t offset : offsets_) {
            for (size_t i = 0; i < bytes + kLine; i += kLine) {
                _mm_prefetch(reinterpret_cast<const char*>(at_) + offset + bytes + i, _MM_HINT_T0);
            }
        }
    }

    /// Four bytes of each row, in its lane.
    __m512i word(size_t byte) const {
        return _mm512_i32gather_epi32(_mm512_load_si512(offsets_), at_ + byte, 1);
    }

    /// 64 bytes of each row, as 16 such words.
    void words(size_t byte, __m512i (&found)[kLanes]) const {
        __m512i given[kLanes], turned[kLanes];
        for (size_t i = 0; i < kLanes; ++i) {
            given[i] = _mm512_loadu_si512(at_ + offsets_[i] + byte);
        }
        for (size_t i = 0; i < kLanes; i += 4) {  // word 4p + j of four rows, in part p of turned[j]
            const __m512i a = _mm512_unpacklo_epi32(given[i], given[i + 1]);
            const __m512i b = _mm512_unpackhi_epi32(given[i], given[i + 1]);
            const __m512i c = _mm512_unpacklo_epi32(given[i + 2], given[i + 3]);
            const __m512i d = _mm512_unpackhi_epi32(given[i + 2], given[i + 3]);
            turned[i] = _mm512_unpacklo_epi64(a, c);
            turned[i + 1] = _mm512_unpackhi_epi64(a, c);
            turned[i + 2] = _mm512_unpacklo_epi64(b, d);
            turned[i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        for (size_t j = 0; j < 4; ++j) {
            const __m512i a = _mm512_shuffle_i32x4(turned[j], turned[4 + j], 0x44);
            const __m512i b = _mm512_shuffle_i32x4(turned[j], turned[4 + j], 0xEE);
            const __m512i c = _mm512_shuffle_i32x4(turned[8 + j], turned[12 + j], 0x44);
            const __m512i d = _mm512_shuffle_i32x4(turned[8 + j], turned[12 + j], 0xEE);
            found[j] = _mm512_shuffle_i32x4(a, c, 0x88);
            found[4 + j] = _mm512_shuffle_i32x4(a, c, 0xDD);
            found[8 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
            found[12 + j] = _mm512_shuffle_i32x4(b, d, 0xDD);
        }
    }

private:
    alignas(64) int32_t offsets_[kLanes];
    const uint8_t* at_;
};

__m512i every(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }

/// The bits of a mask, in each byte, from a bit of it on.
__m512i bits(__m512i words, unsigned from, int mask) {
    return _mm512_and_si512(_mm512_srli_epi32(words, from), every(mask));
}

/// Some bits of each lane, from a bit on, as a number.
__m512i field(__m512i words, unsigned from, int mask) {
    return _mm512_and_si512(_mm512_srli_epi32(words, from), _mm512_set1_epi32(mask));
}

/// Halves in the lower (or upper) 16 bits of lanes.
__m512 halves(__m512i words, unsigned from) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, from)));
}

/// Scales and minima of Q4_K and Q5_K (ggml-common.h): 6 bits of each of eight, and theirs.
void unpack_scales(const Rows& rows, Piece& piece, size_t half) {
    const __m512i both = rows.word(0), first = rows.word(4), second = rows.word(8);
    const __m512i third = rows.word(12);
    const __m512 d = halves(both, 0), d_minima = halves(both, 16);
    for (unsigned i = 0; i < 4; ++i) {
        const auto put = [&](__m512 (*target)[kHalves], __m512 factor, __m512i words, unsigned at) {
            const __m512i low = field(words, 8 * i, 63);
            const __m512i high = _mm512_or_si512(field(third, 8 * i + at, 15),
                                                 _mm512_slli_epi32(field(words, 8 * i + 6, 3), 4));
            target[i][half] = _mm512_mul_ps(factor, _mm512_cvtepi32_ps(low));
            target[4 + i][half] = _mm512_mul_ps(factor, _mm512_cvtepi32_ps(high));
        };
        put(piece.scales, d, first, 0);
        put(piece.minima, d_minima, second, 4);
    }
}

struct Q4K {
    using Block = block_q4_K;
    static constexpr const LargeLayout& kLayout = kWithMinima;

    static void unpack(const Rows& rows, Piece& piece, size_t half) {
        unpack_scales(rows, piece, half);
        for (size_t part = 0; part < 2; ++part) {
            __m512i words[kLanes];
            rows.words(offsetof(Block, qs) + 64 * part, words);
            for (size_t i = 0; i < kLanes; ++i) {
                const size_t at = 32 * part + i / 8 * 16 + i % 8;
                piece.codes[at][half] = bits(words[i], 0, 15);
                piece.codes[at + 8][half] = bits(words[i], 4, 15);
            }
        }
    }
};

struct Q5K {
    using Block = block_q5_K;
    static constexpr const LargeLayout& kLayout = kWithMinima;

    static void unpack(const Rows& rows, Piece& piece, size_t half) {
        unpack_scales(rows, piece, half);
        __m512i words[kLanes], fifths[kLanes];
        rows.words(offsetof(Block, qh), fifths);
        for (size_t part = 0; part < 2; ++part) {
            rows.words(offsetof(Block, qs) + 64 * part, words);
            for (size_t i = 0; i < kLanes; ++i) {
                const size_t group = 4 * part + i / 8 * 2, at = 8 * group + i % 8;
                const auto fifth = [&](size_t bit) {
                    return _mm512_slli_epi32(bits(fifths[i % 8], static_cast<unsigned>(bit), 1), 4);
                };
                piece.codes[at][half] = _mm512_or_si512(bits(words[i], 0, 15), fifth(group));
                piece.codes[at + 8][half] = _mm512_or_si512(bits(words[i], 4, 15), fifth(group + 1));
            }
        }
    }
};

struct Q6K {
    using Block = block_q6_K;
    static constexpr const LargeLayout& kLayout = kOfQ6K;

    static void unpack(const Rows& rows, Piece& piece, size_t half) {
        const __m512 d = halves(rows.word(offsetof(Block, d) - 2), 16);  // a block ends with it
        for (size_t word = 0; word < 4; ++word) {
            const __m512i four = rows.word(offsetof(Block, scales) + 4 * word);
            for (unsigned i = 0; i < 4; ++i) {
                const __m512i scale = _mm512_srai_epi32(_mm512_slli_epi32(four, 24 - 8 * i), 24);
                piece.scales[4 * word + i][half] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(scale));
            }
        }
        __m512i lower[kLanes], upper[kLanes];
        rows.words(offsetof(Block, qh), upper);
        for (size_t part = 0; part < 2; ++part) {
            rows.words(offsetof(Block, ql) + 64 * part, lower);
            for (size_t i = 0; i < kLanes; ++i) {
                const __m512i word = upper[8 * part + i % 8];
                const auto high = [&](size_t bit) {
                    return _mm512_slli_epi32(bits(word, static_cast<unsigned>(bit), 3), 4);
                };
                const size_t at = 32 * part + i, bit = i / 8 * 2;
                piece.codes[at][half] = _mm512_or_si512(bits(lower[i], 0, 15), high(bit));
                piece.codes[at + 16][half] = _mm512_or_si512(bits(lower[i], 4, 15), high(bit + 4));
            }
        }
    }
};

struct Iq4Xs {
    using Block = block_iq4_xs;
    static constexpr const LargeLayout& kLayout = kOfIq4Xs;

    static void unpack(const Rows& rows, Piece& piece, size_t half) {
        const __m512i both = rows.word(0), low = rows.word(offsetof(Block, scales_l));
        const __m512 d = halves(both, 0);
        for (unsigned i = 0; i < 8; ++i) {
            const __m512i six = _mm512_or_si512(field(low, 4 * i, 15),
                                                _mm512_slli_epi32(field(both, 16 + 2 * i, 3), 4));
            const __m512i scale = _mm512_sub_epi32(six, _mm512_set1_epi32(32));
            piece.scales[i][half] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(scale));
        }
        const __m512i table = _mm512_xor_si512(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kvalues_iq4nl))),
            every(0x80));  // counted from -128
        for (size_t part = 0; part < 2; ++part) {
            __m512i words[kLanes];
            rows.words(offsetof(Block, qs) + 64 * part, words);
            for (size_t i = 0; i < kLanes; ++i) {
                const size_t at = 32 * part + i / 4 * 8 + i % 4;
                piece.codes[at][half] = _mm512_shuffle_epi8(table, bits(words[i], 0, 15));
                piece.codes[at + 4][half] = _mm512_shuffle_epi8(table, bits(words[i], 4, 15));
            }
        }
    }
};

/// Add the products of a piece and some vectors to what was found before.
template <class Kind, size_t kN>
void add_products(const Piece& piece, const LargeInput* const* x, float* const* found) {
    constexpr const LargeLayout& kLayout = Kind::kLayout;
    constexpr size_t kPerScale = kLayout.per_scale / 4;
    __m512 sums[kN][kHalves];
    for (auto& both : sums) std::fill_n(both, kHalves, _mm512_setzero_ps());
#pragma GCC unroll 1
    for (size_t scale = 0; scale < QK_K / kLayout.per_scale; ++scale) {
        __m512i whole[kN][kHalves];
        for (auto& both : whole) std::fill_n(both, kHalves, _mm512_setzero_si512());
        const size_t first = scale * kPerScale;
        const size_t at = 32 * kLayout.order[first / 8] + first % 8 * 4;  // of a vector's codes
#pragma GCC unroll 8
        for (size_t i = 0; i < kPerScale; ++i) {
            for (size_t v = 0; v < kN; ++v) {
                int32_t four;
                std::memcpy(&four, x[v]->codes + at + 4 * i, sizeof four);
                for (size_t half = 0; half < kHalves; ++half) {
                    whole[v][half] = _mm512_dpbusd_epi32(
                        whole[v][half], piece.codes[first + i][half], _mm512_set1_epi32(four));
                }
            }
        }
        for (size_t v = 0; v < kN; ++v) {
            const __m512 of_vector = _mm512_set1_ps(x[v]->sums[kLayout.first_sum + scale]);
            for (size_t half = 0; half < kHalves; ++half) {
                __m512& sum = sums[v][half];
                __m512 product = _mm512_cvtepi32_ps(whole[v][half]);
                if constexpr (kLayout.first_sum == 0) product = _mm512_sub_ps(product, of_vector);
                sum = _mm512_fmadd_ps(product, piece.scales[scale][half], sum);
                if constexpr (kLayout.first_sum != 0) {
                    sum = _mm512_fnmadd_ps(of_vector, piece.minima[scale][half], sum);
                }
            }
        }
    }
    for (size_t v = 0; v < kN; ++v) {
        for (size_t half = 0; half < kHalves; ++half) {
            float* const to = found[v] + half * kLanes;
            const __m512 before = _mm512_loadu_ps(to);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(sums[v][half], _mm512_set1_ps(x[v]->d), before));
        }
    }
}

/// The same for any number of them.
template <class Kind>
void add_all(const Piece& piece, const LargeInput* const* x, size_t n, float* const* found) {
    for (; n >= 8; n -= 8, x += 8, found += 8) add_products<Kind, 8>(piece, x, found);
    for (; n >= 4; n -= 4, x += 4, found += 4) add_products<Kind, 4>(piece, x, found);
    for (; n >= 2; n -= 2, x += 2, found += 2) add_products<Kind, 2>(piece, x, found);
    if (n == 1) add_products<Kind, 1>(piece, x, found);
}

template <class Kind>
void multiply_tile(const uint8_t* weights, size_t row_bytes, size_t n_rows, const Inputs& inputs,
                   const uint32_t* vectors, size_t n_vectors, Products& products) {
    constexpr size_t kBytes = sizeof(typename Kind::Block);
    Piece piece;
    const LargeInput* x[kTileVectors];
    float* found[kTileVectors];
    for (size_t row = 0; row < n_rows; row += kRows) {
        const size_t last = n_rows - 1, next = std::min(row + kLanes, last);
        Rows lower(weights + row * row_bytes, row_bytes, n_rows - row);
        Rows upper(weights + next * row_bytes, row_bytes, n_rows - next);
        for (size_t i = 0; i < n_vectors; ++i) {
            x[i] = reinterpret_cast<const LargeInput*>(inputs.at(vectors[i]));
            found[i] = products.of(i) + row;
            std::fill_n(found[i], kRows, 0.0F);
        }
        for (size_t b = 0; b < inputs.n_columns() / QK_K; ++b) {
            size_t half = 0;
            for (Rows* const rows : {&lower, &upper}) {
                rows->read_ahead(kBytes);
                Kind::unpack(*rows, piece, half++);
                rows->advance(kBytes);
            }
            add_all<Kind>(piece, x, n_vectors, found);
            for (size_t i = 0; i < n_vectors; ++i) ++x[i];
        }
    }
}

}  // namespace

VnniTile* vnni_tile(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K: return multiply_tile<Q4K>;
        case GGML_TYPE_Q5_K: return multiply_tile<Q5K>;
        case GGML_TYPE_Q6_K: return multiply_tile<Q6K>;
        case GGML_TYPE_IQ4_XS: return multiply_tile<Iq4Xs>;
        default: return nullptr;
    }
}

#else

VnniTile* vnni_tile(ggml_type) { return nullptr; }

#endif

}  // namespace vkmoe
