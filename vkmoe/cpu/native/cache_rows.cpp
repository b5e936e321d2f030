#include "cache_rows.hpp"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <ggml-cpu.h>
#include <ggml.h>

#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kNormPerHead = 1, kNormFullWidth = 2;  // norms of q and k
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

}  // namespace

void CacheType::store(const float* values, uint8_t* row, size_t n) const {
    if (is_half) {
        ggml_cpu_fp32_to_fp16(values, reinterpret_cast<ggml_fp16_t*>(row), static_cast<int64_t>(n));
    } else {
        std::memcpy(row, values, n * sizeof(float));
    }
}

const float* CacheType::load(const uint8_t* row, float* room, size_t n) const {
    if (!is_half) return reinterpret_cast<const float*>(row);
    ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(row), room, static_cast<int64_t>(n));
    return room;
}

Place::Place(const Call& call, size_t n_rows, size_t region_bytes)
    : params(call, n_rows),
      context(call.count("context")),
      n_regions(call.count("n_regions")),
      region_bytes(region_bytes) {
    require(n_rows > 0 && context > 0 && n_regions > 0, call, "there is nothing to read");
}

uint8_t* Place::cache(const Call& call, const char* name) const {
    auto* const found = const_cast<uint8_t*>(call.bytes(name, n_regions * region_bytes));
    require(found != nullptr, call, "a cache has no address");
    return found;
}

Heads::Heads(const Call& call, size_t n_rows, size_t region_bytes)
    : type(call),
      dim(call.count("head_dim")),
      n_queries(call.count("n_heads")),
      n_kv(call.count("n_kv_heads")),
      rotary_(call.count("rotary_dim")),
      style_(call.count("rope_style")),
      norm_(call.count("norm_mode")),
      pitch_(call.count("qkv_pitch")),
      eps_(call.real("eps")),
      place_(call, n_rows, region_bytes) {
    const size_t least_bytes = n_kv * place_.context * row_bytes();
    if (region_bytes == 0) place_.region_bytes = least_bytes;
    require(dim > 0 && n_kv > 0 && n_queries % n_kv == 0, call, "heads do not share keys");
    require(rotary_ % 2 == 0 && rotary_ <= dim && style_ <= 1, call, "no such RoPE");
    require(place_.region_bytes >= least_bytes, call, "regions overlap");
    keys_ = place_.cache(call, "k_cache");
    values_ = place_.cache(call, "v_cache");
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
    if (norm_ == kNormPerHead) factor *= inverse_rms(given, dim, eps_);
    if (norm_ == kNormFullWidth) gain += (is_key ? index - n_queries : index) * dim;
    for (size_t i = 0; i < dim; ++i) found[i] = given[i] * (norm_ != 0 ? gain[i] : 1.0F) * factor;
    rotate(found, rope_ + place_.position(row) * rotary_, rotary_, style_);
}

void Heads::append(size_t row, size_t kv_head) const {
    std::vector<float> key(dim);
    project(row, n_queries + kv_head, 1.0F, key.data());
    const size_t found = at(row, kv_head, place_.position(row));
    type.store(key.data(), keys_ + found, dim);
    type.store(queries(row) + (n_queries + n_kv + kv_head) * dim, values_ + found, dim);
}

LatentRows::LatentRows(const Call& call, size_t n_rows, size_t n_heads, size_t region_bytes)
    : type(call),
      kv_rank(call.count("kv_rank")),
      rope_dim(call.count("rope_dim")),
      nope_dim_(call.count("nope_dim")),
      style_(call.count("rope_style")),
      q_offset_(call.count("q_offset")),
      q_pitch_(call.count("q_pitch")),
      kv_offset_(call.count("kv_offset")),
      kv_pitch_(call.count("kv_pitch")),
      eps_(call.real("eps")),
      place_(call, n_rows, region_bytes) {
    const size_t least_bytes = place_.context * row_bytes();
    if (region_bytes == 0) place_.region_bytes = least_bytes;
    require(n_heads > 0 && kv_rank > 0 && rope_dim % 2 == 0 && style_ <= 1, call, "no such RoPE");
    require(place_.region_bytes >= least_bytes, call, "regions overlap");
    rows_ = place_.cache(call, "rows");
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
    uint8_t* const target =
        rows_ + place_.region_at(row) + place_.position(row) * row_bytes();
    type.store(found.data(), target, row_dim());
}

}  // namespace vkmoe
