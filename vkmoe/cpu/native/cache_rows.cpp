#include "cache_rows.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <ggml-cpu.h>
#include <ggml.h>

#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kNormPerHead = 1, kNormFullWidth = 2;  // norms of q and k
constexpr size_t kNormPerHeadTurned = 3;                // with gains behind RoPE
constexpr size_t kHalves = 0;                           // of the styles of RoPE

/// Turn the first `rotary` values of a head (Su et al. 2021); `table` has pairs (cosine, sine).
void rotate(float* values, const float* table, size_t rotary, size_t style) {
    const size_t n_pairs = rotary / 2;
    for (size_t pair = 0; pair < n_pairs; ++pair) {
        const size_t one = style == kHalves ? pair : 2 * pair;
        const size_t other = style == kHalves ? pair + n_pairs : 2 * pair + 1;
        const float cosine = table[2 * pair], sine = table[2 * pair + 1];
        const float a = values[one], b = values[other];
        values[one] = a * cosine - b * sine;
        values[other] = b * cosine + a * sine;
    }
}

/// What the norm of a vector multiplies by, but for the gain.
float inverse_rms(const float* values, size_t n, float eps) {
    return 1.0F / std::sqrt(dot(values, values, n) / static_cast<float>(n) + eps);
}

constexpr size_t kBlock = 32;  // numbers that share a scale

/// Whether vectors of `n` can be transformed in such blocks: a power of two, up to 32.
bool divides(size_t block, size_t n) {
    return block > 0 && block <= kBlock && (block & (block - 1)) == 0 && n % block == 0;
}

constexpr float kHalfMax = 65504.0F;
constexpr uint16_t kHalfNan = 0x7E00;

/// Ask for what is a few rows ahead: processors do so themselves, but not far enough.
void read_ahead(const uint8_t* row, size_t n_bytes) {
    constexpr size_t kAhead = 4096, kLine = 64;
    for (size_t i = 0; i < n_bytes; i += kLine) __builtin_prefetch(row + kAhead + i);
}

/// Make quants of at most a block of numbers; returns their scale, an f16: a 127th of the largest.
/// A quant is the whole number nearest to value / scale, at a tie the one farther from zero.
uint16_t quantise(const float* values, size_t n, uint8_t* quants) {
    constexpr float kShare = 0.00787401574803149606F, kHighest = 127.0F;
    float top = 0.0F;
    bool is_damaged = false;
    for (size_t i = 0; i < n; ++i) {
        is_damaged = is_damaged || std::isnan(values[i]);
        top = std::max(top, std::abs(values[i]));
    }
    top = std::min(top, std::numeric_limits<float>::max());
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const uint16_t scale = ggml_fp32_to_fp16(is_damaged ? nan : std::min(top * kShare, kHalfMax));
    const float factor = ggml_fp16_to_fp32(scale);
    const bool has_quants = factor > 0.0F;
    for (size_t i = 0; i < n; ++i) {
        const double size = std::min(std::abs(values[i]), kHighest * factor);
        const auto whole = has_quants ? std::floor(size / static_cast<double>(factor) + 0.5) : 0.0;
        quants[i] = static_cast<uint8_t>(static_cast<int8_t>(std::copysign(whole, values[i])));
    }
    return scale;
}

/// The lowest and the highest of a block, within a bound; `has_nan`: neither is of meaning.
struct Extremes {
    float lowest, highest;
    bool has_nan = false;

    Extremes(const float* values, size_t n, float bound) : lowest(bound), highest(-bound) {
        for (size_t i = 0; i < n; ++i) {
            const float value = std::min(std::max(values[i], -bound), bound);
            has_nan = has_nan || std::isnan(values[i]);
            lowest = std::min(lowest, value);
            highest = std::max(highest, value);
        }
    }
};

/// The whole number nearest to size / scale, at most `most`, at a tie the larger one.
double nearest(float size, float scale, float most) {
    if (!(scale > 0.0F)) return 0.0;
    return std::floor(std::min(size, most * scale) / static_cast<double>(scale) + 0.5);
}

/// Make quants of at most a block of numbers, one a byte; returns their scale, an f16: an eighth of
/// the number of the largest magnitude, negated. Quants are the nearest, 8 more than what they mean.
uint16_t quantise_q4(const float* values, size_t n, uint8_t* quants) {
    const Extremes found(values, n, std::numeric_limits<float>::max());
    const float extreme = -found.lowest >= found.highest ? found.lowest : found.highest;
    const float bounded = std::min(std::max(extreme * -0.125F, -kHalfMax), kHalfMax);
    const uint16_t scale = found.has_nan ? kHalfNan : ggml_fp32_to_fp16(bounded);
    const float factor = ggml_fp16_to_fp32(scale);
    for (size_t i = 0; i < n; ++i) {
        const double size = nearest(std::abs(values[i]), std::abs(factor), 8.0F);
        const double whole = (values[i] < 0.0F) != (factor < 0.0F) ? -size : size;
        quants[i] = static_cast<uint8_t>(std::min(whole, 7.0) + 8.0);
    }
    return scale;
}

/// What the numbers of a block of q5_1 share.
struct Shared {
    uint16_t scale, minimum;
    uint8_t fifth_bits[4];  // of dim 8u + 4h + i: bit 2u + h of byte i
};
static_assert(sizeof(Shared) == 8);

/// Make quants of at most a block of numbers, one a byte: the nearest to (value - minimum) / scale,
/// which is a 31st of the range.
Shared quantise_q5(const float* values, size_t n, uint8_t* quants) {
    constexpr float kShare = 0.0322580645161290323F;
    const Extremes found(values, n, kHalfMax);
    Shared shared{kHalfNan, 0, {}};
    if (!found.has_nan) {
        shared.scale = ggml_fp32_to_fp16((found.highest - found.lowest) * kShare);
        shared.minimum = ggml_fp32_to_fp16(found.lowest);
    }
    const float factor = ggml_fp16_to_fp32(shared.scale);
    const float minimum = ggml_fp16_to_fp32(shared.minimum);
    for (size_t i = 0; i < n; ++i) {
        const float above = std::min(std::max(values[i], -kHalfMax), kHalfMax) - minimum;
        quants[i] = static_cast<uint8_t>(nearest(std::max(above, 0.0F), factor, 31.0F));
        shared.fifth_bits[i % 4] |= static_cast<uint8_t>(quants[i] >> 4 << (i / 4));
    }
    return shared;
}

/// Put the lowest 4 bits of quants into half as many bytes: of 8 in a row, byte i has those of
/// quant i and, above them, of quant 4 + i.
void pack_nibbles(const uint8_t* quants, size_t n, uint8_t* packed) {
    for (size_t i = 0; i < n; i += 8) {
        for (size_t j = 0; j < 4; ++j) {
            packed[i / 2 + j] = static_cast<uint8_t>((quants[i + j] & 15) |
                                                     (quants[i + 4 + j] & 15) << 4);
        }
    }
}

}  // namespace

void hadamard(float* values, size_t n, size_t block) {
    if (block <= 1) return;
    const float factor = 1.0F / std::sqrt(static_cast<float>(block));
    for (size_t first = 0; first < n; first += block) {
        float* const of = values + first;
        for (size_t step = 1; step < block; step *= 2) {
            for (size_t i = 0; i < block; ++i) {
                if ((i & step) != 0) continue;
                const float one = of[i], other = of[i + step];
                of[i] = one + other;
                of[i + step] = one - other;
            }
        }
        for (size_t i = 0; i < block; ++i) of[i] *= factor;
    }
}

CacheType::CacheType(const Call& call, const char* name, size_t n_rows, size_t dim)
    : kind_(static_cast<Kind>(call.count(name))), n_rows_(n_rows), dim_(dim) {
    require(kind_ <= kQ4, call, "no such type of a cache");
    require(n_rows > 0 && dim > 0 && dim % 8 == 0, call, "there is nothing to read");
}

size_t CacheType::region_bytes() const {
    constexpr size_t kAlignment = 16;
    return ceil_divide(n_rows_ * (row_bytes() + scale_bytes()), kAlignment) * kAlignment;
}

uint16_t* CacheType::scales(const uint8_t* region, size_t row) const {
    const uint8_t* const found = region + n_rows_ * row_bytes() + row * scale_bytes();
    return reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(found));
}

void CacheType::store(const float* values, uint8_t* region, size_t row) const {
    uint8_t* const target = region + row * row_bytes();
    if (kind_ == kSingle) {
        std::memcpy(target, values, dim_ * sizeof(float));
    } else if (kind_ == kHalf) {
        ggml_cpu_fp32_to_fp16(values, reinterpret_cast<ggml_fp16_t*>(target),
                              static_cast<int64_t>(dim_));
    } else {
        store_blocks(values, target, scales(region, row));
    }
}

void CacheType::store_blocks(const float* values, uint8_t* target, uint16_t* scale) const {
    std::memset(scale, 0, scale_bytes());
    for (size_t first = 0; first < dim_; first += kBlock) {
        const size_t n = std::min(kBlock, dim_ - first), block = first / kBlock;
        if (kind_ == kQ8) {
            scale[block] = quantise(values + first, n, target + first);
            continue;
        }
        uint8_t quants[kBlock];
        if (kind_ == kQ4) {
            scale[block] = quantise_q4(values + first, n, quants);
        } else {
            const Shared shared = quantise_q5(values + first, n, quants);
            std::memcpy(scale + block * sizeof(Shared) / 2, &shared, sizeof(Shared));
        }
        pack_nibbles(quants, n, target + first / 2);
    }
}

const float* CacheType::load(const uint8_t* region, size_t row, float* room, size_t n) const {
    const uint8_t* const found = region + row * row_bytes();
    read_ahead(found, row_bytes());
    if (kind_ == kSingle) return reinterpret_cast<const float*>(found);
    if (kind_ == kHalf) {
        ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(found), room,
                              static_cast<int64_t>(n));
        return room;
    }
    const uint16_t* const scale = scales(region, row);
    for (size_t first = 0; first < n; first += kBlock) {
        const size_t n_left = std::min(kBlock, n - first), block = first / kBlock;
        if (kind_ == kQ8) {
            scale_quants(reinterpret_cast<const int8_t*>(found) + first,
                         ggml_fp16_to_fp32(scale[block]), n_left, room + first);
        } else if (kind_ == kQ4) {
            const float factor = ggml_fp16_to_fp32(scale[block]);
            scale_nibbles(found + first / 2, nullptr, factor, -8.0F * factor, n_left, room + first);
        } else {
            Shared shared;
            std::memcpy(&shared, scale + block * sizeof(Shared) / 2, sizeof(Shared));
            scale_nibbles(found + first / 2, shared.fifth_bits, ggml_fp16_to_fp32(shared.scale),
                          ggml_fp16_to_fp32(shared.minimum), n_left, room + first);
        }
    }
    return room;
}

Place::Place(const Call& call, size_t n_rows)
    : params(call, n_rows), context(call.count("context")), n_regions(call.count("n_regions")) {
    require(n_rows > 0 && context > 0 && n_regions > 0, call, "there is nothing to read");
}

Cache::Cache(const Call& call, const char* name, const CacheType& type, size_t n_regions)
    : type(type),
      data(const_cast<uint8_t*>(call.bytes(name, n_regions * type.region_bytes()))) {
    require(data != nullptr, call, "a cache has no address");
}

Heads::Heads(const Call& call, size_t n_rows)
    : dim(call.count("head_dim")),
      n_queries(call.count("n_heads")),
      n_kv(call.count("n_kv_heads")),
      ring_(call.count("ring")),
      places_(ring_ != 0 ? ring_ : call.count("context")),
      rotary_(call.count("rotary_dim")),
      style_(call.count("rope_style")),
      norm_(call.count("norm_mode")),
      pitch_(call.count("qkv_pitch")),
      of_keys_(call.count("k_hadamard")),
      of_values_(call.count("v_hadamard")),
      norms_values_(call.count("value_norm") != 0),
      eps_(call.real("eps")),
      place_(call, n_rows),
      keys_(call, "k_cache", {call, "k_type", n_kv * places_, dim}, place_.n_regions),
      values_(call, "v_cache", {call, "v_type", n_kv * places_, dim}, place_.n_regions) {
    require(dim > 0 && n_kv > 0 && n_queries % n_kv == 0, call, "heads do not share keys");
    require(rotary_ % 2 == 0 && rotary_ <= dim && style_ <= 1, call, "no such RoPE");
    require(divides(of_keys_, dim) && divides(of_values_, dim), call, "no such transform");
    rope_ = floats(call, "rope_table", place_.context * rotary_);
    const bool is_full = norm_ == kNormFullWidth;
    q_gain_ = floats(call, "q_gain", (is_full ? n_queries : 1) * dim);
    k_gain_ = floats(call, "k_gain", (is_full ? n_kv : 1) * dim);
    require(rope_ != nullptr || rotary_ == 0, call, "the RoPE table has no address");
    require(norm_ == 0 || (q_gain_ != nullptr && k_gain_ != nullptr), call,
            "a gain has no address");
    qkv_ = call.words<float>("qkv", reach(n_rows, pitch_, (n_queries + 2 * n_kv) * dim));
}

float Heads::common_factor(size_t row, bool is_key) const {
    if (norm_ != kNormFullWidth) return 1.0F;
    const float* const q = queries(row);
    return is_key ? inverse_rms(q + n_queries * dim, n_kv * dim, eps_)
                  : inverse_rms(q, n_queries * dim, eps_);
}

void Heads::project(size_t row, size_t index, float factor, float* found) const {
    project_with(common_factor(row, index >= n_queries), row, index, factor, found);
}

void Heads::project_with(float common, size_t row, size_t index, float factor, float* found) const {
    const float* const given = queries(row) + index * dim;
    const bool is_key = index >= n_queries;
    const float* gain = is_key ? k_gain_ : q_gain_;
    factor *= common;
    const bool gains_last = norm_ == kNormPerHeadTurned;
    if (norm_ == kNormPerHead || gains_last) factor *= inverse_rms(given, dim, eps_);
    if (norm_ == kNormFullWidth) gain += (is_key ? index - n_queries : index) * dim;
    const bool gains_first = norm_ != 0 && !gains_last;
    for (size_t i = 0; i < dim; ++i) found[i] = given[i] * (gains_first ? gain[i] : 1.0F) * factor;
    rotate(found, rope_ + place_.position(row) * rotary_, rotary_, style_);
    for (size_t i = 0; gains_last && i < dim; ++i) found[i] *= gain[i];
}

size_t Heads::n_query_spans() const { return norm_ == kNormFullWidth ? 1 : n_queries; }

void Heads::append(size_t row, size_t kv_head) const {
    std::vector<float> key(dim);
    project(row, n_queries + kv_head, 1.0F, key.data());
    hadamard(key.data(), dim, of_keys_);
    const size_t region = place_.region(row), position = place_.position(row);
    const size_t found = ring(kv_head).row(position);
    const float* const given = queries(row) + (n_queries + n_kv + kv_head) * dim;
    std::vector<float> value(given, given + dim);
    if (norms_values_) {
        const float factor = inverse_rms(given, dim, eps_);
        for (float& one : value) one *= factor;
    }
    hadamard(value.data(), dim, of_values_);
    keys_.type.store(key.data(), keys_.region(region), found);
    values_.type.store(value.data(), values_.region(region), found);
}

LatentRows::LatentRows(const Call& call, size_t n_rows, size_t n_heads)
    : kv_rank(call.count("kv_rank")),
      rope_dim(call.count("rope_dim")),
      nope_dim_(call.count("nope_dim")),
      style_(call.count("rope_style")),
      block_(call.count("k_hadamard")),
      q_offset_(call.count("q_offset")),
      q_pitch_(call.count("q_pitch")),
      kv_offset_(call.count("kv_offset")),
      kv_pitch_(call.count("kv_pitch")),
      eps_(call.real("eps")),
      place_(call, n_rows),
      rows_(call, "rows", {call, "k_type", place_.context, row_dim()}, place_.n_regions) {
    require(n_heads > 0 && kv_rank > 0 && rope_dim % 2 == 0 && style_ <= 1, call, "no such RoPE");
    require(divides(block_, kv_rank) && divides(block_, rope_dim), call, "no such transform");
    gain_ = floats(call, "gain", kv_rank);
    rope_ = floats(call, "rope_table", place_.context * rope_dim);
    require(gain_ != nullptr, call, "a gain has no address");
    require(rope_ != nullptr || rope_dim == 0, call, "the RoPE table has no address");
    const size_t n_q = q_offset_ + n_heads * (nope_dim_ + rope_dim);
    q_ = call.words<float>("q", reach(n_rows, q_pitch_, n_q));
    kv_ = call.words<const float>("kv", reach(n_rows, kv_pitch_, kv_offset_ + row_dim()));
}

void LatentRows::turn(size_t row, float* values) const {
    rotate(values, rope_ + place_.position(row) * rope_dim, rope_dim, style_);
}

void LatentRows::append(size_t row) const {
    const float* const given = kv_ + row * kv_pitch_ + kv_offset_;
    std::vector<float> found(row_dim());
    const float factor = inverse_rms(given, kv_rank, eps_);
    for (size_t i = 0; i < kv_rank; ++i) found[i] = given[i] * gain_[i] * factor;
    std::copy_n(given + kv_rank, rope_dim, found.begin() + static_cast<std::ptrdiff_t>(kv_rank));
    turn(row, found.data() + kv_rank);
    hadamard(found.data(), row_dim(), block_);
    rows_.type.store(found.data(), rows_.region(place_.region(row)), place_.position(row));
}

}  // namespace vkmoe
