// Attention of rows that are decoded, as attention.comp, latent_attention.comp and
// attention_combine.comp do it: the cache is read in splits, which are joined in their order.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include <ggml.h>
#include <ggml-cpu.h>

#include "inputs.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kWhole = 0, kAppend = 1, kRead = 2;              // modes, as ops/attention.py has them
constexpr size_t kNormPerHead = 1, kNormFullWidth = 2;            // norms of q and k
constexpr size_t kHalves = 0;                                     // of the styles of RoPE
constexpr size_t kSplitStep = 32;                                 // attention_split.glsl
constexpr float kLowest = -3.0e38F;

/// Which positions are seen, and by which split.
struct Seen {
    size_t position, first, length;  // of the row; the first seen; positions of a split

    Seen(size_t row_position, size_t context, size_t window, size_t n_splits)
        : position(std::min(row_position, context - 1)),
          first(window != 0 && position >= window ? position - window + 1 : 0),
          length(ceil_divide((position - first) / n_splits + 1, kSplitStep) * kSplitStep) {}

    size_t n_splits() const { return (position - first) / length + 1; }
};

/// Rows of a cache, in f16 or f32.
struct CacheType {
    bool is_half;

    size_t bytes(size_t n) const { return n * (is_half ? 2 : 4); }

    void store(const float* values, uint8_t* row, size_t n) const {
        if (is_half) {
            ggml_cpu_fp32_to_fp16(values, reinterpret_cast<ggml_fp16_t*>(row),
                                  static_cast<int64_t>(n));
        } else {
            std::memcpy(row, values, n * sizeof(float));
        }
    }

    /// The values of a row, in `room` where they have to be brought there.
    const float* load(const uint8_t* row, float* room, size_t n) const {
        if (!is_half) return reinterpret_cast<const float*>(row);
        ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(row), room,
                              static_cast<int64_t>(n));
        return room;
    }
};

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

/// The splits of a cache, read for heads that share its rows; what they leave are partials.
struct Splits {
    size_t n, n_shared;  // splits; heads that read a row together
    size_t key_dim, value_dim, context, window, pitch;
    CacheType type;
    float* partials;

    /// Words of the partials of a row of the batch.
    size_t n_words(size_t n_heads) const { return n_heads * n * (value_dim + 2); }

    float* out(size_t row, size_t head, size_t split) const {
        return partials + row * pitch + (head * n + split) * (value_dim + 2);
    }

    /// The partials of a split of a row of the batch at some position, for the heads from `head` on,
    /// whose queries these are. Keys and values are those of position 0; rows lie `stride` apart.
    void read(size_t row, size_t position, size_t head, size_t split, const float* queries,
              const uint8_t* keys, const uint8_t* values, size_t stride) const {
        const Seen seen(position, context, window, n);
        const size_t start = seen.first + split * seen.length;
        if (start > seen.position) return;  // an unused split
        const size_t length = std::min(start + seen.length, seen.position + 1) - start;
        std::vector<float> scores(n_shared * length), room(key_dim);
        for (size_t t = 0; t < length; ++t) {
            const float* const key =
                type.load(keys + (start + t) * stride, room.data(), key_dim);
            for (size_t h = 0; h < n_shared; ++h) {
                scores[h * length + t] = dot(queries + h * key_dim, key, key_dim);
            }
        }
        for (size_t h = 0; h < n_shared; ++h) {
            weigh(scores.data() + h * length, length, out(row, head + h, split));
        }
        for (size_t t = 0; t < length; ++t) {
            const float* const value =
                type.load(values + (start + t) * stride, room.data(), value_dim);
            for (size_t h = 0; h < n_shared; ++h) {
                add_scaled(out(row, head + h, split), scores[h * length + t], value, value_dim);
            }
        }
    }

private:
    /// Turn scores into weights, relative to the largest; begin a head's partials.
    void weigh(float* scores, size_t length, float* found) const {
        const float top = largest(scores, length, kLowest);
        float damage = 0.0F;  // NaN where a score is: it is to be seen in the end
        for (size_t t = 0; t < length; ++t) {
            if (scores[t] <= top) continue;
            damage = std::numeric_limits<float>::quiet_NaN();
            scores[t] = kLowest;
        }
        std::fill_n(found, value_dim, 0.0F);
        found[value_dim] = top;
        found[value_dim + 1] = exponentials(scores, length, top) + damage;
    }
};

/// Where a row of the batch stands, and where its sequence's part of a cache is.
struct Place {
    Params params;
    size_t context, n_regions, region_bytes;

    size_t region_at(size_t row) const {
        return std::min<size_t>(params.region(row), n_regions - 1) * region_bytes;
    }

    size_t position(size_t row) const {
        return std::min<size_t>(params.position(row), context - 1);
    }
};

bool is_half(const Call& call) { return call.variant.find(".f16") != std::string::npos; }

Place place_of(const Call& call, size_t n_rows) {
    const Place place{Params(call, n_rows), call.count("context"), call.count("n_regions"),
                      call.count("region_bytes")};
    require(place.context > 0 && place.n_regions > 0, call, "there is nothing to read");
    return place;
}

Splits splits_of(const Call& call, size_t n_rows, size_t key_dim, size_t value_dim,
                 size_t n_heads, size_t window) {
    Splits splits{call.count("n_splits"), call.count("workgroup_heads"), key_dim, value_dim,
                  call.count("context"), window, call.count("partials_pitch"),
                  CacheType{is_half(call)}, nullptr};
    require(splits.n > 0 && splits.n_shared > 0 && n_heads % splits.n_shared == 0, call,
            "heads do not share rows");
    splits.partials =
        call.words<float>("partials", reach(n_rows, splits.pitch, splits.n_words(n_heads)));
    return splits;
}

/// What the norm of a vector multiplies by, but for the gain.
float inverse_rms(const float* values, size_t n, float eps) {
    return 1.0F / std::sqrt(dot(values, values, n) / static_cast<float>(n) + eps);
}

/// Steps in which rows take what they bring to their caches, `bring`, and then read: for each of
/// `n_items` of a row, and of those of its heads that share rows in each split.
std::vector<Step> in_turn(const Place& place, const Splits& splits, size_t n_rows, size_t n_heads,
                          size_t n_items, bool reads,
                          const std::function<void(size_t row, size_t item)>& bring,
                          const std::function<void(size_t row, size_t head, size_t split)>& read) {
    std::vector<Step> steps{{n_rows * n_items,
                             [=](size_t item, size_t) {
                                 const size_t row = item / n_items;
                                 if (row < place.params.n_rows()) bring(row, item % n_items);
                             },
                             false}};
    if (!reads) return steps;
    const size_t n_groups = n_heads / splits.n_shared;
    steps.push_back({n_rows * n_groups * splits.n,
                     [=](size_t item, size_t) {
                         const size_t row = item / (n_groups * splits.n);
                         const size_t head = item / splits.n % n_groups * splits.n_shared;
                         if (row < place.params.n_rows()) read(row, head, item % splits.n);
                     },
                     true});
    return steps;
}

/// All that an attention dispatch goes by.
struct Attention {
    size_t head_dim, n_heads, n_kv_heads, rotary, style, norm, qkv_pitch;
    float eps, scale;
    uint8_t *keys, *values;
    const float *q_gain, *k_gain, *rope;
    const float* qkv;
    Place place;
    Splits splits;

    size_t row_bytes() const { return splits.type.bytes(head_dim); }

    /// Bytes from the beginning of a cache to a position of a head.
    size_t at(size_t row, size_t kv_head, size_t position) const {
        return place.region_at(row) + (kv_head * place.context + position) * row_bytes();
    }

    /// A head of q (`index` below n_heads) or k after norm and RoPE, times a factor.
    void project(size_t row, size_t index, float factor, float* found) const {
        const float* const of_row = qkv + row * qkv_pitch;
        const size_t first = index * head_dim, n_q = n_heads * head_dim;
        const bool is_key = index >= n_heads;
        const float* gain = is_key ? k_gain : q_gain;
        if (norm == kNormPerHead) factor *= inverse_rms(of_row + first, head_dim, eps);
        if (norm == kNormFullWidth) {
            factor *= is_key ? inverse_rms(of_row + n_q, n_kv_heads * head_dim, eps)
                             : inverse_rms(of_row, n_q, eps);
            gain += is_key ? first - n_q : first;
        }
        for (size_t i = 0; i < head_dim; ++i) {
            found[i] = of_row[first + i] * (norm != 0 ? gain[i] : 1.0F) * factor;
        }
        rotate(found, rope + place.position(row) * rotary, rotary, style);
    }

    void append(size_t row, size_t kv_head) const {
        std::vector<float> key(head_dim);
        project(row, n_heads + kv_head, 1.0F, key.data());
        const size_t found = at(row, kv_head, place.position(row));
        splits.type.store(key.data(), keys + found, head_dim);
        const size_t v_at = (n_heads + n_kv_heads + kv_head) * head_dim;
        splits.type.store(qkv + row * qkv_pitch + v_at, values + found, head_dim);
    }
};

/// All that a dispatch of latent attention goes by.
struct LatentAttention {
    size_t kv_rank, rope_dim, nope_dim, style, absorbed_pitch, q_offset, q_pitch, kv_offset,
        kv_pitch;
    float eps, scale;
    uint8_t* rows;
    const float *gain, *rope, *absorbed, *q, *kv;
    Place place;
    Splits splits;

    size_t row_dim() const { return kv_rank + rope_dim; }
    size_t row_bytes() const { return splits.type.bytes(row_dim()); }
    const float* turns(size_t row) const { return rope + place.position(row) * rope_dim; }

    /// The query of a head: its absorbed part, and its other one after RoPE.
    void project(size_t row, size_t head, float* found) const {
        const float* const first = absorbed + row * absorbed_pitch + head * kv_rank;
        const float* const other =
            q + row * q_pitch + q_offset + head * (nope_dim + rope_dim) + nope_dim;
        for (size_t i = 0; i < kv_rank; ++i) found[i] = scale * first[i];
        for (size_t i = 0; i < rope_dim; ++i) found[kv_rank + i] = scale * other[i];
        rotate(found + kv_rank, turns(row), rope_dim, style);
    }

    void append(size_t row) const {
        const float* const given = kv + row * kv_pitch + kv_offset;
        std::vector<float> found(row_dim());
        const float factor = inverse_rms(given, kv_rank, eps);
        for (size_t i = 0; i < kv_rank; ++i) found[i] = given[i] * gain[i] * factor;
        std::copy_n(given + kv_rank, rope_dim, found.begin() + static_cast<std::ptrdiff_t>(kv_rank));
        rotate(found.data() + kv_rank, turns(row), rope_dim, style);
        uint8_t* const target = rows + place.region_at(row) + place.position(row) * row_bytes();
        splits.type.store(found.data(), target, row_dim());
    }
};

}  // namespace

std::vector<Step> attention(const Call& call) {
    const size_t n_rows = call.groups[2], mode = call.count("mode");
    require(n_rows > 0 && mode <= kRead, call, "there is nothing to do");
    const size_t head_dim = call.count("head_dim"), n_heads = call.count("n_heads");
    Attention a{head_dim, n_heads, call.count("n_kv_heads"), call.count("rotary_dim"),
                call.count("rope_style"), call.count("norm_mode"), call.count("qkv_pitch"),
                call.real("eps"), call.real("scale"), nullptr, nullptr, nullptr, nullptr, nullptr,
                nullptr, place_of(call, n_rows),
                splits_of(call, n_rows, head_dim, head_dim, n_heads, call.count("window"))};
    require(a.head_dim > 0 && a.n_kv_heads > 0 && a.n_heads % a.n_kv_heads == 0 &&
                a.n_heads / a.n_kv_heads % a.splits.n_shared == 0,
            call, "heads do not share keys");
    require(a.rotary % 2 == 0 && a.rotary <= a.head_dim && a.style <= 1, call, "no such RoPE");
    require(a.place.region_bytes >= a.n_kv_heads * a.place.context * a.row_bytes(), call,
            "regions overlap");
    const size_t cache_bytes = a.place.n_regions * a.place.region_bytes;
    a.keys = const_cast<uint8_t*>(call.bytes("k_cache", cache_bytes));
    a.values = const_cast<uint8_t*>(call.bytes("v_cache", cache_bytes));
    a.rope = floats(call, "rope_table", a.place.context * a.rotary);
    const bool is_full = a.norm == kNormFullWidth;
    a.q_gain = floats(call, "q_gain", (is_full ? a.n_heads : 1) * a.head_dim);
    a.k_gain = floats(call, "k_gain", (is_full ? a.n_kv_heads : 1) * a.head_dim);
    require(a.keys != nullptr && a.values != nullptr, call, "a cache has no address");
    require(a.rope != nullptr || a.rotary == 0, call, "the RoPE table has no address");
    require(a.norm == 0 || (a.q_gain != nullptr && a.k_gain != nullptr), call,
            "a gain has no address");
    const size_t width = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim;
    a.qkv = call.words<const float>("qkv", reach(n_rows, a.qkv_pitch, width));

    const size_t n_asked = mode == kAppend ? 0 : n_heads;
    const size_t n_appended = mode == kRead ? 0 : a.n_kv_heads;
    const auto queries = std::make_shared<std::vector<float>>(n_rows * n_asked * head_dim);
    const auto query = [=](size_t row, size_t head) {
        return queries->data() + (row * n_asked + head) * head_dim;
    };
    const auto bring = [=](size_t row, size_t index) {
        if (index < n_asked) {
            a.project(row, index, a.scale, query(row, index));
        } else {
            a.append(row, index - n_asked);
        }
    };
    const auto read = [=](size_t row, size_t head, size_t split) {
        const size_t first = a.at(row, head / (a.n_heads / a.n_kv_heads), 0);
        a.splits.read(row, a.place.position(row), head, split, query(row, head), a.keys + first,
                      a.values + first, a.row_bytes());
    };
    return in_turn(a.place, a.splits, n_rows, n_heads, n_asked + n_appended, mode != kAppend,
                   bring, read);
}

std::vector<Step> latent_attention(const Call& call) {
    const size_t n_rows = call.groups[2], mode = call.count("mode");
    require(n_rows > 0 && mode <= kRead, call, "there is nothing to do");
    const size_t kv_rank = call.count("kv_rank"), rope_dim = call.count("rope_dim");
    const size_t n_heads = call.groups[0] * call.count("workgroup_heads");
    LatentAttention a{kv_rank, rope_dim, call.count("nope_dim"), call.count("rope_style"),
                      call.count("absorbed_pitch"), call.count("q_offset"), call.count("q_pitch"),
                      call.count("kv_offset"), call.count("kv_pitch"), call.real("eps"),
                      call.real("scale"), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                      place_of(call, n_rows),
                      splits_of(call, n_rows, kv_rank + rope_dim, kv_rank, n_heads, 0)};
    require(kv_rank > 0 && rope_dim % 2 == 0 && a.style <= 1, call, "no such RoPE");
    require(a.place.region_bytes >= a.place.context * a.row_bytes(), call, "regions overlap");
    const size_t cache_bytes = a.place.n_regions * a.place.region_bytes;
    a.rows = const_cast<uint8_t*>(call.bytes("rows", cache_bytes));
    a.gain = floats(call, "gain", kv_rank);
    a.rope = floats(call, "rope_table", a.place.context * rope_dim);
    require(a.rows != nullptr && a.gain != nullptr, call, "the cache or a gain has no address");
    require(a.rope != nullptr || rope_dim == 0, call, "the RoPE table has no address");
    a.absorbed =
        call.words<const float>("absorbed", reach(n_rows, a.absorbed_pitch, n_heads * kv_rank));
    const size_t n_q = a.q_offset + n_heads * (a.nope_dim + rope_dim);
    a.q = call.words<const float>("q", reach(n_rows, a.q_pitch, n_q));
    a.kv = call.words<const float>("kv", reach(n_rows, a.kv_pitch, a.kv_offset + a.row_dim()));

    const size_t n_asked = mode == kAppend ? 0 : n_heads, n_appended = mode == kRead ? 0 : 1;
    const auto queries = std::make_shared<std::vector<float>>(n_rows * n_asked * a.row_dim());
    const auto query = [=](size_t row, size_t head) {
        return queries->data() + (row * n_asked + head) * a.row_dim();
    };
    const auto bring = [=](size_t row, size_t index) {
        if (index < n_asked) {
            a.project(row, index, query(row, index));
        } else {
            a.append(row);
        }
    };
    const auto read = [=](size_t row, size_t head, size_t split) {
        const uint8_t* const rows = a.rows + a.place.region_at(row);
        a.splits.read(row, a.place.position(row), head, split, query(row, head), rows, rows,
                      a.row_bytes());
    };
    return in_turn(a.place, a.splits, n_rows, n_heads, n_asked + n_appended, mode != kAppend,
                   bring, read);
}

std::vector<Step> attention_combine(const Call& call) {
    constexpr float kLargest = 3.0e38F;  // so that infinite sinks leave no NaN
    const size_t n_heads = call.groups[0], n_rows = call.groups[2];
    const size_t head_dim = call.count("head_dim"), n_splits = call.count("n_splits");
    const size_t context = call.count("context"), window = call.count("window");
    const size_t partials_pitch = call.count("partials_pitch"), out_pitch = call.count("out_pitch");
    require(n_heads > 0 && n_rows > 0 && head_dim > 0 && n_splits > 0 && context > 0, call,
            "there is nothing to do");
    const float* const sinks = floats(call, "sinks", n_heads);
    const Params params(call, n_rows);
    const auto* const partials = call.words<const float>(
        "partials", reach(n_rows, partials_pitch, n_heads * n_splits * (head_dim + 2)));
    auto* const out = call.words<float>("out", reach(n_rows, out_pitch, n_heads * head_dim));
    const auto join = [=](size_t item, size_t) {
        const size_t row = item / n_heads, head = item % n_heads;
        if (row >= params.n_rows()) return;
        const size_t n_used = Seen(params.position(row), context, window, n_splits).n_splits();
        const float* const of_head =
            partials + row * partials_pitch + head * n_splits * (head_dim + 2);
        const auto split = [=](size_t s) { return of_head + s * (head_dim + 2); };
        float top = split(0)[head_dim], total = 0.0F;
        for (size_t s = 1; s < n_used; ++s) top = std::max(top, split(s)[head_dim]);
        if (sinks != nullptr) {
            const float sink = std::clamp(sinks[head], -kLargest, kLargest);
            top = std::max(top, sink);
            total = std::exp(sink - top);
        }
        float* const found = out + row * out_pitch + head * head_dim;
        std::fill_n(found, head_dim, 0.0F);
        for (size_t s = 0; s < n_used; ++s) {
            const float factor = std::exp(split(s)[head_dim] - top);
            total += factor * split(s)[head_dim + 1];
            add_scaled(found, factor, split(s), head_dim);
        }
        for (size_t i = 0; i < head_dim; ++i) found[i] *= 1.0F / total;
    };
    return {{n_rows * n_heads, join, false}};
}

}  // namespace vkmoe
