// Attention of the rows of prompts, as append_rows.comp, append_latent_rows.comp and
// prompt_attention.comp do it, and hadamard.comp: all rows bring what they add to the caches, then each sees its own.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cache_rows.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

// Positions whose weights are found together: an absolute grid.
constexpr size_t kBlock = 32;
constexpr size_t kAtOnce = 16;  // columns whose weights are kept
constexpr float kLowest = -3.0e38F, kLargest = 3.0e38F;

/// Positions that a row sees, first and last.
struct Seen {
    size_t first, last;
};

/// A head of a row: a column, which is summed up by itself.
struct Column {
    size_t row, head;
    Seen seen;
    float top = kLowest, total = 0.0F;  // what its weights are relative to, and their sum
};

/// A dispatch of attention: what it reads, and where it leaves what.
struct Walk {
    size_t row_dim, value_dim, n_heads, n_kv_heads, ring_places, window, n_columns;
    size_t query_pitch, rest_offset, rest_pitch, rest_stride, out_pitch;
    float scale;
    Place place;
    Cache keys, values;
    const float *sinks, *queries, *rest;
    float* out;

    size_t group() const { return n_heads / n_kv_heads; }

    Seen seen_by(size_t row) const {
        const size_t position = place.position(row);
        return {window != 0 && position >= window ? position - window + 1 : 0, position};
    }

    void load_query(const Column& column, float* query) const {
        const float* const first =
            queries + column.row * query_pitch + column.head * value_dim;
        for (size_t i = 0; i < value_dim; ++i) query[i] = scale * first[i];
        const float* const other =
            rest + rest_offset + column.row * rest_pitch + column.head * rest_stride;
        for (size_t i = value_dim; i < row_dim; ++i) query[i] = scale * other[i - value_dim];
    }

    /// The columns of an item that share a kv head: heads of rows, in order.
    void run(size_t kv_head, size_t first_column, size_t n) const {
        std::vector<Column> columns;
        for (size_t i = first_column; i < first_column + n; ++i) {
            const size_t row = i / group();
            if (row >= place.params.n_rows()) break;
            columns.push_back({row, kv_head * group() + i % group(), seen_by(row)});
        }
        std::vector<float> query(columns.size() * row_dim), sums(columns.size() * value_dim);
        for (size_t c = 0; c < columns.size(); ++c) load_query(columns[c], &query[c * row_dim]);
        for (size_t c = 0; c < columns.size();) {  // rows of one sequence at a time
            size_t end = c;
            const size_t region = place.region(columns[c].row);
            while (end < columns.size() && place.region(columns[end].row) == region) ++end;
            walk(&columns[c], end - c, &query[c * row_dim], &sums[c * value_dim], region,
                 kv_head);
            c = end;
        }
        for (size_t c = 0; c < columns.size(); ++c) store(columns[c], &sums[c * value_dim]);
    }

    void walk(Column* columns, size_t n, const float* query, float* sums, size_t region,
              size_t kv_head) const {
        Seen all = columns[0].seen;
        for (size_t c = 1; c < n; ++c) {
            all.first = std::min(all.first, columns[c].seen.first);
            all.last = std::max(all.last, columns[c].seen.last);
        }
        const Ring ring(ring_places, place.context, kv_head);
        std::vector<float> key_room(kBlock * row_dim), value_room(kBlock * value_dim);
        for (size_t begin = all.first / kBlock * kBlock; begin <= all.last; begin += kBlock) {
            const size_t first = std::max(begin, all.first);
            const size_t end = std::min(begin + kBlock, all.last + 1);
            const float *of_key[kBlock], *of_value[kBlock];
            for (size_t t = first; t < end; ++t) {
                const size_t i = t - begin;
                of_key[i] = keys.type.load(keys.region(region), ring.row(t), &key_room[i * row_dim],
                                           row_dim);
                // Of latent attention a value is the beginning of its key.
                of_value[i] = values.type.load(values.region(region), ring.row(t),
                                               &value_room[i * value_dim], value_dim);
            }
            for (size_t c = 0; c < n;) {
                const auto from = [&](size_t i) { return std::max(begin, columns[i].seen.first); };
                const auto to = [&](size_t i) {
                    return std::min(begin + kBlock, columns[i].seen.last + 1);
                };
                size_t other = c;  // columns that see the same of the block
                while (other < n && other < c + kAtOnce && from(other) == from(c) &&
                       to(other) == to(c)) {
                    ++other;
                }
                if (from(c) < to(c)) {
                    const size_t skipped = from(c) - begin;
                    add(columns + c, other - c, query + c * row_dim, of_key + skipped,
                        of_value + skipped, to(c) - from(c), sums + c * value_dim);
                }
                c = other;
            }
        }
    }

    /// Add to columns what they see of a block: `n_seen` of its keys and values.
    void add(Column* columns, size_t n, const float* query, const float* const* of_key,
             const float* const* of_value, size_t n_seen, float* sums) const {
        float weights[kAtOnce * kBlock];
        products(query, n, of_key, n_seen, row_dim, weights, kBlock);
        for (size_t c = 0; c < n; ++c) {
            weigh(columns[c], weights + c * kBlock, n_seen, sums + c * value_dim);
        }
        add_all_scaled(sums, n, weights, kBlock, of_value, n_seen, value_dim);
    }

    /// Make weights of a column's scores, relative to the largest so far.
    void weigh(Column& column, float* weights, size_t n, float* sums) const {
        float damage = 0.0F;  // NaN where a score is: it is to be seen in the end
        const float top = largest(weights, n, column.top);
        for (size_t t = 0; t < n; ++t) {
            if (weights[t] <= top) continue;
            damage = std::numeric_limits<float>::quiet_NaN();
            weights[t] = kLowest;
        }
        if (top != column.top) {
            const float factor = std::exp(column.top - top);
            fade(sums, factor, value_dim, sums);
            column.total *= factor;
            column.top = top;
        }
        column.total += exponentials(weights, n, top) + damage;
    }

    void store(const Column& column, const float* sums) const {
        float factor = 1.0F / column.total;
        if (sinks != nullptr) {
            const float sink = std::clamp(sinks[column.head], -kLargest, kLargest);
            const float higher = std::max(column.top, sink), fade = std::exp(column.top - higher);
            factor = fade / (column.total * fade + std::exp(sink - higher));
        }
        float* const found = out + column.row * out_pitch + column.head * value_dim;
        for (size_t i = 0; i < value_dim; ++i) found[i] = sums[i] * factor;
    }
};

}  // namespace

std::vector<Step> append_rows(const Call& call) {
    const size_t n_rows = call.groups[1];
    const Heads heads(call, n_rows);
    const bool has_keys = call.groups[0] > heads.n_query_spans();
    const auto take = [=](size_t row, size_t) {
        if (row >= heads.place().params.n_rows()) return;
        for (size_t head = 0; has_keys && head < heads.n_kv; ++head) heads.append(row, head);
        const float common = heads.common_factor(row, false);
        std::vector<float> query(heads.dim);
        for (size_t head = 0; head < heads.n_queries; ++head) {
            heads.project_with(common, row, head, 1.0F, query.data());
            std::copy(query.begin(), query.end(), heads.queries(row) + head * heads.dim);
        }
    };
    return {{n_rows, take, false}};
}

std::vector<Step> append_latent_rows(const Call& call) {
    const size_t n_rows = call.groups[1], n_heads = call.count("n_heads");
    const LatentRows rows(call, n_rows, n_heads);
    const auto take = [=](size_t row, size_t) {
        if (row >= rows.place().params.n_rows()) return;
        rows.append(row);
        for (size_t head = 0; head < n_heads; ++head) rows.turn(row, rows.rotary_query(row, head));
    };
    return {{n_rows, take, false}};
}

std::vector<Step> hadamard(const Call& call) {
    const size_t n_rows = call.groups[1], n_heads = call.count("n_heads");
    const size_t offset = call.count("offset"), pitch = call.count("pitch");
    const size_t stride = call.count("stride"), dim = call.count("head_dims");
    const size_t block = call.count("block");
    require(n_rows > 0 && n_heads > 0 && dim > 0 && dim <= stride, call, "there is nothing to do");
    require(block > 0 && (block & (block - 1)) == 0 && dim % block == 0, call, "no such transform");
    const Params params(call, n_rows);
    const size_t n_words = offset + (n_heads - 1) * stride + dim;
    auto* const values = call.words<float>("values", reach(n_rows, pitch, n_words));
    const auto transform = [=](size_t item, size_t) {
        const size_t row = item / n_heads, head = item % n_heads;
        if (row >= params.n_rows()) return;
        hadamard(values + offset + row * pitch + head * stride, dim, block);
    };
    return {{n_rows * n_heads, transform, false}};
}

std::vector<Step> prompt_attention(const Call& call) {
    const size_t row_dim = call.count("row_dim"), value_dim = call.count("value_dim");
    const size_t n_heads = call.count("n_heads"), n_kv_heads = call.count("n_kv_heads");
    const size_t n_columns = call.count("workgroup_heads");
    require(value_dim > 0 && value_dim <= row_dim && n_columns > 0, call, "there is nothing to do");
    require(n_kv_heads > 0 && n_heads % n_kv_heads == 0, call, "heads do not share keys");
    // The rows of the batch are those that the tensors have room for, up to whole workgroups.
    const size_t query_pitch = call.count("query_pitch"), width = n_heads * value_dim;
    const size_t n_groups = call.groups[0] * call.groups[2], n_words = call.n_words("queries");
    require(n_groups > 0 && query_pitch > 0 && n_words >= width, call, "there is nothing to do");
    const size_t room = (n_words - width) / query_pitch + 1;
    const size_t n_rows = std::min({ceil_divide(n_groups * n_columns, n_heads / n_kv_heads), room,
                                    Params::most_rows(call)});
    const Place place(call, n_rows);
    const size_t ring = call.count("ring");
    const size_t n_cached = n_kv_heads * (ring != 0 ? ring : place.context);
    Walk walk{row_dim, value_dim, n_heads, n_kv_heads, ring, call.count("window"), n_columns,
              query_pitch, call.count("rest_offset"), call.count("rest_pitch"),
              call.count("rest_stride"), call.count("out_pitch"), call.real("scale"),
              place, {call, "k_cache", {call, "k_type", n_cached, row_dim}, place.n_regions},
              {call, "v_cache", {call, "v_type", n_cached, row_dim}, place.n_regions}, nullptr,
              nullptr, nullptr, nullptr};
    walk.sinks = floats(call, "sinks", n_heads);
    walk.queries = call.words<const float>("queries", reach(n_rows, query_pitch, width));
    const size_t n_rest = (n_heads - 1) * walk.rest_stride + row_dim - value_dim;
    const bool is_latent = row_dim != value_dim;
    walk.rest = call.words<const float>(
        "rest", is_latent ? walk.rest_offset + reach(n_rows, walk.rest_pitch, n_rest) : 0);
    walk.out = call.words<float>("out", reach(n_rows, walk.out_pitch, width));

    const auto attend = [=](size_t item, size_t) {
        const size_t first = item / n_kv_heads * n_columns;
        if (first / walk.group() >= n_rows) return;
        walk.run(item % n_kv_heads, first, n_columns);
    };
    return {{n_groups * n_kv_heads, attend, false}};
}

}  // namespace vkmoe
