// Attention of rows that are decoded, as attention.comp and attention_combine.comp do it: the cache
// is read in splits, which are joined in their order.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
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

/// All that an attention dispatch goes by.
struct Attention {
    size_t head_dim, n_heads, n_kv_heads, rotary, style, norm, n_splits, workgroup_heads;
    size_t context, window, mode, n_regions, region_bytes, qkv_pitch, partials_pitch;
    float eps, scale;
    CacheType type;
    uint8_t *keys, *values;
    const float *q_gain, *k_gain, *rope;
    const float* qkv;
    float* partials;
    Params params;

    size_t row_bytes() const { return type.bytes(head_dim); }

    size_t region_at(size_t row) const {
        return std::min<size_t>(params.region(row), n_regions - 1) * region_bytes;
    }

    size_t position(size_t row) const {
        return std::min<size_t>(params.position(row), context - 1);
    }

    /// What the norm of a head multiplies by, but for the gain.
    float inverse_rms(size_t row, size_t first, size_t width) const {
        const float* const head = qkv + row * qkv_pitch + first;
        return 1.0F / std::sqrt(dot(head, head, width) / static_cast<float>(width) + eps);
    }

    /// A head of q (`index` below n_heads) or k after norm and RoPE, times a factor.
    void project(size_t row, size_t index, float factor, float* found) const {
        const size_t first = index * head_dim;
        const bool is_key = index >= n_heads;
        const size_t of_kind = is_key ? first - n_heads * head_dim : first;
        const float* const gain = is_key ? k_gain : q_gain;
        if (norm == kNormPerHead) factor *= inverse_rms(row, first, head_dim);
        if (norm == kNormFullWidth) {
            factor *= is_key ? inverse_rms(row, n_heads * head_dim, n_kv_heads * head_dim)
                             : inverse_rms(row, 0, n_heads * head_dim);
        }
        const float* const raw = qkv + row * qkv_pitch + first;
        for (size_t i = 0; i < head_dim; ++i) {
            const float at = norm == kNormPerHead     ? gain[i]
                             : norm == kNormFullWidth ? gain[of_kind + i]
                                                      : 1.0F;
            found[i] = raw[i] * at * factor;
        }
        rotate(found, rope + position(row) * rotary, rotary, style);
    }

    void append(size_t row, size_t kv_head) const {
        std::vector<float> key(head_dim);
        project(row, n_heads + kv_head, 1.0F, key.data());
        const size_t at = region_at(row) + (kv_head * context + position(row)) * row_bytes();
        type.store(key.data(), keys + at, head_dim);
        const size_t v_at = (n_heads + n_kv_heads + kv_head) * head_dim;
        type.store(qkv + row * qkv_pitch + v_at, values + at, head_dim);
    }

    /// The partials of a split, of some heads that share their keys; `queries` are theirs.
    void read(size_t row, size_t first_head, size_t split, const float* queries) const {
        const Seen seen(params.position(row), context, window, n_splits);
        const size_t start = seen.first + split * seen.length;
        if (start > seen.position) return;  // an unused split
        const size_t end = std::min(start + seen.length, seen.position + 1), n = end - start;
        const size_t kv_head = first_head / (n_heads / n_kv_heads);
        const size_t at = region_at(row) + (kv_head * context + start) * row_bytes();
        std::vector<float> scores(workgroup_heads * n), room(head_dim);
        for (size_t t = 0; t < n; ++t) {
            const float* const key = type.load(keys + at + t * row_bytes(), room.data(), head_dim);
            for (size_t h = 0; h < workgroup_heads; ++h) {
                scores[h * n + t] = dot(queries + h * head_dim, key, head_dim);
            }
        }
        for (size_t h = 0; h < workgroup_heads; ++h) {
            float* const found = out(row, first_head + h, split);
            float* const weights = scores.data() + h * n;
            const float top = largest(weights, n, kLowest);
            float damage = 0.0F;  // NaN where a score is: it is to be seen in the end
            for (size_t t = 0; t < n; ++t) {
                if (weights[t] <= top) continue;
                damage = std::numeric_limits<float>::quiet_NaN();
                weights[t] = kLowest;
            }
            std::fill_n(found, head_dim, 0.0F);
            found[head_dim] = top;
            found[head_dim + 1] = exponentials(weights, n, top) + damage;
        }
        for (size_t t = 0; t < n; ++t) {
            const float* const value =
                type.load(values + at + t * row_bytes(), room.data(), head_dim);
            for (size_t h = 0; h < workgroup_heads; ++h) {
                add_scaled(out(row, first_head + h, split), scores[h * n + t], value, head_dim);
            }
        }
    }

    float* out(size_t row, size_t head, size_t split) const {
        return partials + row * partials_pitch + (head * n_splits + split) * (head_dim + 2);
    }
};

bool is_half(const Call& call) { return call.variant.find(".f16") != std::string::npos; }

}  // namespace

std::vector<Step> attention(const Call& call) {
    const size_t n_rows = call.groups[2];
    require(n_rows > 0, call, "there is nothing to do");
    Attention a{call.count("head_dim"), call.count("n_heads"), call.count("n_kv_heads"),
                call.count("rotary_dim"), call.count("rope_style"), call.count("norm_mode"),
                call.count("n_splits"), call.count("workgroup_heads"), call.count("context"),
                call.count("window"), call.count("mode"), call.count("n_regions"),
                call.count("region_bytes"), call.count("qkv_pitch"), call.count("partials_pitch"),
                call.real("eps"), call.real("scale"), CacheType{is_half(call)}, nullptr, nullptr,
                nullptr, nullptr, nullptr, nullptr, nullptr, Params(call, n_rows)};
    require(a.head_dim > 0 && a.n_kv_heads > 0 && a.n_heads % a.n_kv_heads == 0 &&
                a.workgroup_heads > 0 && a.n_heads / a.n_kv_heads % a.workgroup_heads == 0,
            call, "heads do not share keys");
    require(a.rotary % 2 == 0 && a.rotary <= a.head_dim && a.style <= 1, call, "no such RoPE");
    require(a.n_splits > 0 && a.context > 0 && a.n_regions > 0 && a.mode <= kRead, call,
            "there is nothing to read");
    require(a.region_bytes >= a.n_kv_heads * a.context * a.row_bytes(), call, "regions overlap");
    const size_t cache_bytes = a.n_regions * a.region_bytes;
    a.keys = const_cast<uint8_t*>(call.bytes("k_cache", cache_bytes));
    a.values = const_cast<uint8_t*>(call.bytes("v_cache", cache_bytes));
    a.rope = floats(call, "rope_table", a.context * a.rotary);
    const bool is_full = a.norm == kNormFullWidth;
    a.q_gain = floats(call, "q_gain", (is_full ? a.n_heads : 1) * a.head_dim);
    a.k_gain = floats(call, "k_gain", (is_full ? a.n_kv_heads : 1) * a.head_dim);
    require(a.keys != nullptr && a.values != nullptr, call, "a cache has no address");
    require(a.rope != nullptr || a.rotary == 0, call, "the RoPE table has no address");
    require(a.norm == 0 || (a.q_gain != nullptr && a.k_gain != nullptr), call,
            "a gain has no address");
    const size_t width = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim;
    a.qkv = call.words<const float>("qkv", reach(n_rows, a.qkv_pitch, width));
    a.partials = call.words<float>(
        "partials", reach(n_rows, a.partials_pitch, a.n_heads * a.n_splits * (a.head_dim + 2)));

    const size_t n_heads = a.mode == kAppend ? 0 : a.n_heads;  // that are asked for
    const size_t n_appended = a.mode == kRead ? 0 : a.n_kv_heads, n_each = n_heads + n_appended;
    const auto queries = std::make_shared<std::vector<float>>(n_rows * n_heads * a.head_dim);
    const auto bring = [=](size_t item, size_t) {
        const size_t row = item / n_each, index = item % n_each;
        if (row >= a.params.n_rows()) return;
        if (index < n_heads) {
            float* const found = queries->data() + (row * n_heads + index) * a.head_dim;
            a.project(row, index, a.scale, found);
        } else {
            a.append(row, index - n_heads);
        }
    };
    std::vector<Step> steps{{n_rows * n_each, bring, false}};
    if (a.mode != kAppend) {
        const size_t n_groups = a.n_heads / a.workgroup_heads;
        const auto read = [=](size_t item, size_t) {
            const size_t row = item / (n_groups * a.n_splits);
            const size_t head = item / a.n_splits % n_groups * a.workgroup_heads;
            if (row >= a.params.n_rows()) return;
            const float* const own = queries->data() + (row * n_heads + head) * a.head_dim;
            a.read(row, head, item % a.n_splits, own);
        };
        steps.push_back({n_rows * n_groups * a.n_splits, read, true});
    }
    return steps;
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
