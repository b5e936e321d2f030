// What a row brings to attention, decoded or of a prompt: its queries after norm and RoPE, and what
// it adds to the caches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "inputs.hpp"

namespace vkmoe {

/// Rows of a cache, in f16 or f32.
struct CacheType {
    bool is_half;

    explicit CacheType(const Call& call)
        : is_half(call.variant.find(".f16") != std::string::npos) {}

    size_t bytes(size_t n) const { return n * (is_half ? 2 : 4); }

    void store(const float* values, uint8_t* row, size_t n) const;

    /// The values of a row, in `room` where they have to be brought there.
    const float* load(const uint8_t* row, float* room, size_t n) const;
};

/// Where a row of the batch stands, and where its sequence's part of a cache is.
struct Place {
    Params params;
    size_t context, n_regions, region_bytes;

    Place(const Call& call, size_t n_rows, size_t region_bytes);

    size_t region_at(size_t row) const {
        return std::min<size_t>(params.region(row), n_regions - 1) * region_bytes;
    }

    size_t position(size_t row) const {
        return std::min<size_t>(params.position(row), context - 1);
    }

    /// A cache at the address of that name, all regions of it.
    uint8_t* cache(const Call& call, const char* name) const;
};

/// Heads of q, k and v of rows, and the caches of k and v.
class Heads {
public:
    /// Must hold: regions are of `region_bytes`, or, for 0, just as long as they have to be.
    Heads(const Call& call, size_t n_rows, size_t region_bytes);

    const CacheType type;
    const size_t dim, n_queries, n_kv;  // of a head; heads

    const Place& place() const { return place_; }
    size_t row_bytes() const { return type.bytes(dim); }

    /// Bytes from the beginning of a cache to a position of a head.
    size_t at(size_t row, size_t kv_head, size_t position) const {
        return place_.region_at(row) + (kv_head * place_.context + position) * row_bytes();
    }

    const uint8_t* keys() const { return keys_; }
    const uint8_t* values() const { return values_; }

    /// The first word of a row's q.
    float* queries(size_t row) const { return qkv_ + row * pitch_; }

    /// A head of q (`index` below n_queries) or k after norm and RoPE, times a factor; `found` may
    /// be where it is, if its norm is not of other heads, too.
    void project(size_t row, size_t index, float factor, float* found) const;

    /// What all heads of q (or of k) are multiplied by where one norm is of all, and else 1.
    float common_factor(size_t row, bool is_key) const;

    /// The same, with that factor known.
    void project_with(float common, size_t row, size_t index, float factor, float* found) const;

    /// Put k, after norm and RoPE, and v into the caches.
    void append(size_t row, size_t kv_head) const;

private:
    size_t rotary_, style_, norm_, pitch_;
    float eps_;
    Place place_;
    uint8_t *keys_, *values_;
    const float *q_gain_, *k_gain_, *rope_;
    float* qkv_;
};

/// Rows of latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1), and their cache.
class LatentRows {
public:
    /// As for Heads.
    LatentRows(const Call& call, size_t n_rows, size_t n_heads, size_t region_bytes);

    const CacheType type;
    const size_t kv_rank, rope_dim;

    const Place& place() const { return place_; }
    size_t row_dim() const { return kv_rank + rope_dim; }
    size_t row_bytes() const { return type.bytes(row_dim()); }
    const uint8_t* cached(size_t row) const { return rows_ + place_.region_at(row); }

    /// The rotary part of a head's query, raw.
    float* rotary_query(size_t row, size_t head) const {
        return q_ + row * q_pitch_ + q_offset_ + head * (nope_dim_ + rope_dim) + nope_dim_;
    }

    /// Turn a rotary part of a row.
    void turn(size_t row, float* values) const;

    /// Put the compressed part, after its norm, and the rotary one into the cache.
    void append(size_t row) const;

private:
    size_t nope_dim_, style_, q_offset_, q_pitch_, kv_offset_, kv_pitch_;
    float eps_;
    Place place_;
    uint8_t* rows_;
    const float *gain_, *rope_;
    float* q_;
    const float* kv_;
};

}  // namespace vkmoe
