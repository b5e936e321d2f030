// Attention of rows that are decoded, as attention.comp, latent_attention.comp and
// attention_combine.comp do it: the cache is read in splits, which are joined in their order.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "cache_rows.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kWhole = 0, kAppend = 1, kRead = 2;    // modes, as kernels/attention/operations.py has them
constexpr size_t kSplitStep = 32;                       // attention_split.glsl
constexpr size_t kBlock = 32;                           // positions that are read at once
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

/// The rows of a kv head, by position.
struct Strip {
    const CacheType& type;
    const uint8_t* region;
    Ring ring;

    Strip(const Cache& cache, size_t index, const Ring& ring)
        : type(cache.type), region(cache.region(index)), ring(ring) {}

    const float* load(size_t position, float* room, size_t n) const {
        return type.load(region, ring.row(position), room, n);
    }
};

/// The splits of a cache, read for heads that share its rows; what they leave are partials.
struct Splits {
    size_t n, n_shared;  // splits; heads that read a row together
    size_t key_dim, value_dim, context, window, pitch;
    float* partials;

    /// Words of the partials of a row of the batch.
    size_t n_words(size_t n_heads) const { return n_heads * n * (value_dim + 2); }

    float* out(size_t row, size_t head, size_t split) const {
        return partials + row * pitch + (head * n + split) * (value_dim + 2);
    }

    /// The partials of a split of a row of the batch at some position, for the heads from `head` on,
    /// whose queries these are.
    void read(size_t row, size_t position, size_t head, size_t split, const float* queries,
              const Strip& keys, const Strip& values) const {
        const Seen seen(position, context, window, n);
        const size_t start = seen.first + split * seen.length;
        if (start > seen.position) return;  // an unused split
        const size_t end = std::min(start + seen.length, seen.position + 1), length = end - start;
        const size_t pitch = ceil_divide(length, kBlock) * kBlock;
        std::vector<float> scores(n_shared * pitch), room(kBlock * std::max(key_dim, value_dim));
        std::vector<float> sums(n_shared * value_dim);
        const auto by_block = [&](const Strip& strip, size_t dim, auto work) {
            for (size_t first = 0; first < length; first += kBlock) {
                const size_t n_here = std::min(kBlock, length - first);
                const float* loaded[kBlock];
                for (size_t i = 0; i < n_here; ++i) {
                    loaded[i] = strip.load(start + first + i, &room[i * dim], dim);
                }
                work(&scores[first], loaded, n_here);
            }
        };
        by_block(keys, key_dim, [&](float* found, const float* const* loaded, size_t n_here) {
            products(queries, n_shared, loaded, n_here, key_dim, found, pitch);
        });
        for (size_t h = 0; h < n_shared; ++h) {
            weigh(&scores[h * pitch], length, out(row, head + h, split));
        }
        by_block(values, value_dim, [&](const float* found, const float* const* loaded, size_t n_here) {
            add_all_scaled(sums.data(), n_shared, found, pitch, loaded, n_here, value_dim);
        });
        for (size_t h = 0; h < n_shared; ++h) {
            std::copy_n(&sums[h * value_dim], value_dim, out(row, head + h, split));
        }
    }

private:
    /// Turn scores into weights, relative to the largest; both are behind a head's partials.
    void weigh(float* scores, size_t length, float* found) const {
        const float top = largest(scores, length, kLowest);
        float damage = 0.0F;  // NaN where a score is: it is to be seen in the end
        for (size_t t = 0; t < length; ++t) {
            if (scores[t] <= top) continue;
            damage = std::numeric_limits<float>::quiet_NaN();
            scores[t] = kLowest;
        }
        found[value_dim] = top;
        found[value_dim + 1] = exponentials(scores, length, top) + damage;
    }
};

Splits splits_of(const Call& call, size_t n_rows, size_t key_dim, size_t value_dim,
                 size_t n_heads, size_t window) {
    Splits splits{call.count("n_splits"), call.count("workgroup_heads"), key_dim, value_dim,
                  call.count("context"), window, call.count("partials_pitch"),
                  nullptr};
    require(splits.n > 0 && splits.n_shared > 0 && n_heads % splits.n_shared == 0, call,
            "heads do not share rows");
    splits.partials =
        call.words<float>("partials", reach(n_rows, splits.pitch, splits.n_words(n_heads)));
    return splits;
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

}  // namespace

std::vector<Step> attention(const Call& call) {
    const size_t n_rows = call.groups[2], mode = call.count("mode");
    require(mode <= kRead, call, "no such mode");
    const Heads heads(call, n_rows);
    const size_t dim = heads.dim, group = heads.n_queries / heads.n_kv;
    const Splits splits =
        splits_of(call, n_rows, dim, dim, heads.n_queries, call.count("window"));
    require(group % splits.n_shared == 0, call, "heads do not share keys");
    const float scale = call.real("scale");

    const size_t n_asked = mode == kAppend ? 0 : heads.n_queries;
    const size_t n_appended = mode == kRead ? 0 : heads.n_kv;
    const auto queries = std::make_shared<std::vector<float>>(n_rows * n_asked * dim);
    const auto query = [=](size_t row, size_t head) {
        return queries->data() + (row * n_asked + head) * dim;
    };
    const auto bring = [=](size_t row, size_t index) {
        if (index < n_asked) {
            heads.project(row, index, scale, query(row, index));
            heads.transform(query(row, index));
        } else {
            heads.append(row, index - n_asked);
        }
    };
    const auto read = [=](size_t row, size_t head, size_t split) {
        const size_t region = heads.place().region(row), position = heads.place().position(row);
        const Ring ring = heads.ring(head / group);
        splits.read(row, position, head, split, query(row, head), {heads.keys(), region, ring},
                    {heads.values(), region, ring});
    };
    return in_turn(heads.place(), splits, n_rows, heads.n_queries, n_asked + n_appended,
                   mode != kAppend, bring, read);
}

std::vector<Step> latent_attention(const Call& call) {
    const size_t n_rows = call.groups[2], mode = call.count("mode");
    require(mode <= kRead, call, "no such mode");
    const size_t n_heads = call.groups[0] * call.count("workgroup_heads");
    const LatentRows rows(call, n_rows, n_heads);
    const Splits splits = splits_of(call, n_rows, rows.row_dim(), rows.kv_rank, n_heads, 0);
    const size_t absorbed_pitch = call.count("absorbed_pitch");
    const auto* const absorbed =
        call.words<const float>("absorbed", reach(n_rows, absorbed_pitch, n_heads * rows.kv_rank));
    const float scale = call.real("scale");

    const size_t n_asked = mode == kAppend ? 0 : n_heads, n_appended = mode == kRead ? 0 : 1;
    const auto queries = std::make_shared<std::vector<float>>(n_rows * n_asked * rows.row_dim());
    const auto query = [=](size_t row, size_t head) {
        return queries->data() + (row * n_asked + head) * rows.row_dim();
    };
    const auto bring = [=](size_t row, size_t index) {
        if (index >= n_asked) return rows.append(row);
        const float* const first = absorbed + row * absorbed_pitch + index * rows.kv_rank;
        const float* const other = rows.rotary_query(row, index);
        float* const found = query(row, index);
        for (size_t i = 0; i < rows.kv_rank; ++i) found[i] = scale * first[i];
        for (size_t i = 0; i < rows.rope_dim; ++i) found[rows.kv_rank + i] = scale * other[i];
        rows.turn(row, found + rows.kv_rank);
        rows.transform(found);
    };
    const auto read = [=](size_t row, size_t head, size_t split) {
        const Ring ring(0, rows.place().context, 0);
        const Strip cached(rows.cache(), rows.place().region(row), ring);
        splits.read(row, rows.place().position(row), head, split, query(row, head), cached, cached);
    };
    return in_turn(rows.place(), splits, n_rows, n_heads, n_asked + n_appended, mode != kAppend,
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
