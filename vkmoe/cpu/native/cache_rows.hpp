// What a row brings to attention, decoded or of a prompt: its queries after norm and RoPE, and what
// it adds to the caches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "inputs.hpp"

namespace vkmoe {

/// What a region of a cache holds, as vkmoe/kv_types.py has it: rows of `dim` numbers, of all kv
/// heads behind one another; of types with scales first the quants of all, then what blocks share.
struct CacheType {
    enum Kind : size_t { kHalf = 0, kSingle = 1, kQ8 = 2, kQ5 = 3, kQ4 = 4 };

    /// `name`: of the number that says the kind.
    CacheType(const Call& call, const char* name, size_t n_rows, size_t dim);

    /// Bytes of a region.
    size_t region_bytes() const;

    void store(const float* values, uint8_t* region, size_t row) const;

    /// The first `n` values of a row, in `room` where they have to be brought there.
    const float* load(const uint8_t* region, size_t row, float* room, size_t n) const;

private:
    Kind kind_;
    size_t n_rows_, dim_;

    bool has_scales() const { return kind_ >= kQ8; }

    size_t row_bytes() const {
        if (!has_scales()) return dim_ * (kind_ == kHalf ? 2 : 4);
        return kind_ == kQ8 ? dim_ : dim_ / 2;
    }

    size_t scale_bytes() const {
        if (!has_scales()) return 0;
        return kind_ == kQ5 ? (dim_ + 31) / 32 * 8 : (dim_ + 63) / 64 * 4;
    }

    uint16_t* scales(const uint8_t* region, size_t row) const;

    void store_blocks(const float* values, uint8_t* target, uint16_t* scale) const;
};

/// Where a row of the batch stands, and which part of a cache is its sequence's.
struct Place {
    Params params;
    size_t context, n_regions;

    Place(const Call& call, size_t n_rows);

    size_t region(size_t row) const { return std::min<size_t>(params.region(row), n_regions - 1); }

    size_t position(size_t row) const {
        return std::min<size_t>(params.position(row), context - 1);
    }
};

/// Where the rows of a kv head are in a region. Layers that see a window alone have fewer places
/// than there are positions, a power of two: a position has that of its number modulo these.
struct Ring {
    size_t first_row, bits;

    /// `ring`: how many places; 0: each of the `context` positions has one.
    Ring(size_t ring, size_t context, size_t kv_head)
        : first_row(kv_head * (ring != 0 ? ring : context)), bits(ring - 1) {}

    size_t row(size_t position) const { return first_row + (position & bits); }
};

/// Transform blocks of vectors by the Walsh-Hadamard matrix over the root of its size, which is its
/// own inverse; blocks of 1 are what they were. Must hold: a block is a power of two.
void hadamard(float* values, size_t n, size_t block);

/// A cache, all regions of it.
struct Cache {
    CacheType type;
    uint8_t* data = nullptr;

    /// At the address of that name.
    Cache(const Call& call, const char* name, const CacheType& type, size_t n_regions);

    uint8_t* region(size_t index) const { return data + index * type.region_bytes(); }
};

/// Heads of q, k and v of rows, and the caches of k and v.
class Heads {
public:
    Heads(const Call& call, size_t n_rows);

    const size_t dim, n_queries, n_kv;  // of a head; heads

    const Place& place() const { return place_; }

    /// The rows of a head.
    Ring ring(size_t kv_head) const { return {ring_, place_.context, kv_head}; }

    const Cache& keys() const { return keys_; }
    const Cache& values() const { return values_; }

    /// The first word of a row's q.
    float* queries(size_t row) const { return qkv_ + row * pitch_; }

    /// A head of q (`index` below n_queries) or k after norm and RoPE, times a factor; `found` may
    /// be where it is, if its norm is not of other heads, too.
    void project(size_t row, size_t index, float factor, float* found) const;

    /// Transform a head of q as keys are.
    void transform(float* query) const { hadamard(query, dim, of_keys_); }

    /// What all heads of q (or of k) are multiplied by where one norm is of all, and else 1.
    float common_factor(size_t row, bool is_key) const;

    /// The same, with that factor known.
    void project_with(float common, size_t row, size_t index, float factor, float* found) const;

    /// How many workgroups of append_rows.comp take the heads of q; those behind take k and v.
    size_t n_query_spans() const;

    /// Put k, after norm and RoPE, and v, after its norm if it has one, into the caches.
    void append(size_t row, size_t kv_head) const;

private:
    size_t ring_, places_, rotary_, style_, norm_, pitch_, of_keys_, of_values_;
    bool norms_values_;
    float eps_;
    Place place_;
    Cache keys_, values_;
    const float *q_gain_, *k_gain_, *rope_;
    float* qkv_;
};

/// Rows of latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1), and their cache.
class LatentRows {
public:
    LatentRows(const Call& call, size_t n_rows, size_t n_heads);

    const size_t kv_rank, rope_dim;

    const Place& place() const { return place_; }
    size_t row_dim() const { return kv_rank + rope_dim; }
    const Cache& cache() const { return rows_; }

    /// The rotary part of a head's query, raw.
    float* rotary_query(size_t row, size_t head) const {
        return q_ + row * q_pitch_ + q_offset_ + head * (nope_dim_ + rope_dim) + nope_dim_;
    }

    /// Turn a rotary part of a row.
    void turn(size_t row, float* values) const;

    /// Transform a query as cached rows are.
    void transform(float* query) const { hadamard(query, row_dim(), block_); }

    /// Put the compressed part, after its norm, and the rotary one into the cache.
    void append(size_t row) const;

private:
    size_t nope_dim_, style_, block_, q_offset_, q_pitch_, kv_offset_, kv_pitch_;
    float eps_;
    Place place_;
    Cache rows_;
    const float *gain_, *rope_;
    float* q_;
    const float* kv_;
};

}  // namespace vkmoe
