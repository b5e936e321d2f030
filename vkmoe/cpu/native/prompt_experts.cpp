// The experts of a prompt's rows, as expert_tiles.comp, expert_matmul.comp and combine_rows.comp do
// it: pairs of a row and an expert are sorted by expert, and multiplied tile after tile.
#include "kernels.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "experts.hpp"
#include "inputs.hpp"
#include "products.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kRounds = 33, kHeaderWords = 36, kTileWords = 4;  // as kernels/matmul/operations.py has them
constexpr uint64_t kAtHome = 1;                                    // in the low bit of an entry
constexpr uint32_t kNoWord = 0xFFFFFFFF;

/// A tile of the list: pairs of one expert, numbers of the sorted ones.
struct Tile {
    const uint8_t* expert;
    size_t first, n;
};

/// The tiles of a dispatch: those of a round, or those of all rows with one expert.
class Tiles {
public:
    explicit Tiles(const Call& call)
        : fixed_(call.bytes("span", 3 * sizeof(uint64_t))),
          columns_(call.count("lane_dots") * call.count("lane_columns")),
          n_used_(call.count("pairs_of_x")),
          round_(call.count("round_index")),
          most_(call.groups[0]),
          params_(call, 0) {
        require(columns_ > 0 && columns_ <= kTileVectors, call, "tiles are too wide");
        require(n_used_ > 0 && round_ < kRounds && most_ > 0, call, "there are no tiles");
        if (fixed_ != nullptr) return;
        words_ = call.words<const uint32_t>("tiles", kHeaderWords);
        n_words_ = call.n_words("tiles");
        pairs_ = call.words<const uint32_t>("sorted", 0);
        n_sorted_ = call.n_words("sorted");
    }

    size_t most() const { return most_; }
    size_t n_rows() const { return params_.n_rows(); }

    /// Numbers of the sorted pairs that the tiles have: the first, and the one behind the last.
    std::array<size_t, 2> range() const {
        if (fixed_ != nullptr) return {0, n_rows()};
        const size_t n = words_[round_ + 1] - words_[round_];
        const Tile last = n != 0 ? tile(n - 1) : Tile{nullptr, 0, 0};
        return {n != 0 ? tile(0).first : 0, last.first + last.n};
    }

    /// The tile of that number, of no pairs where there is none.
    Tile tile(size_t index) const {
        if (fixed_ != nullptr) {
            const size_t first = index * columns_, n = params_.n_rows();
            return {fixed_, first, first < n ? std::min(columns_, n - first) : 0};
        }
        const size_t number = words_[round_] + index;
        const size_t at = kHeaderWords + kTileWords * number;
        if (number >= words_[round_ + 1] || at + kTileWords > n_words_) return {nullptr, 0, 0};
        const uint64_t address = words_[at] | static_cast<uint64_t>(words_[at + 1]) << 32;
        const size_t first = words_[at + 2], n = std::min<size_t>(words_[at + 3], columns_);
        return {reinterpret_cast<const uint8_t*>(address), first, first + n <= n_sorted_ ? n : 0};
    }

    /// The expert that a list names whose first tile this is; else null.
    const uint8_t* expert_of_first(size_t index) const {
        const uint8_t* const expert = fixed_ == nullptr ? tile(index).expert : nullptr;
        return index == 0 || expert != tile(index - 1).expert ? expert : nullptr;
    }

    /// A pair of the list: row * experts of a row + rank.
    uint32_t pair(size_t index) const {
        return fixed_ != nullptr ? static_cast<uint32_t>(index) : pairs_[index];
    }

private:
    const uint8_t* fixed_;
    const uint32_t *words_ = nullptr, *pairs_ = nullptr;
    size_t columns_, n_used_, round_, most_, n_words_ = 0, n_sorted_ = 0;
    Params params_;
};

/// Pairs of a tile, and the numbers of the inputs they are multiplied with.
struct TilePairs {
    std::array<uint32_t, kTileVectors> pairs, inputs;

    TilePairs(const Tiles& tiles, const Tile& tile, size_t pairs_of_input) {
        for (size_t i = 0; i < tile.n; ++i) {
            pairs[i] = tiles.pair(tile.first + i);
            inputs[i] = pairs[i] / static_cast<uint32_t>(pairs_of_input);
        }
    }
};

/// Steps that have experts read ahead and bring the inputs, each by `bring`, which says how they are
/// numbered, and then take each tile of a round with each group of an expert's rows.
template <class Bring, class Work>
std::vector<Step> by_tile(const Tiles& tiles, const Inputs& inputs, size_t n_rows, Bring bring,
                          Work work) {
    const size_t n_groups = ceil_divide(n_rows, kTileRows);
    const auto multiply_group = [=](size_t item, size_t) {
        const Tile tile = tiles.tile(item / n_groups);
        if (tile.n == 0) return;
        const size_t first = item % n_groups * kTileRows;
        work(tile, first, std::min(kTileRows, n_rows - first));
    };
    const auto ahead = [=](size_t item, size_t) {
        const uint8_t* const expert = tiles.expert_of_first(item);
        if (expert != nullptr) read_ahead(expert);
    };
    return {{tiles.most(), ahead, false},
            {inputs.size(), [=](size_t item, size_t) { bring(item); }, false},
            {tiles.most() * n_groups, multiply_group, true}};
}

/// The rows that take part: those in use, or with `picks` those of them that want logits.
class RowsTaken {
public:
    RowsTaken(const Call& call, size_t most)
        : params_(call, most), picks_(call.count("picks") != 0), most_(most) {
        require(most > 0, call, "there are no rows");
    }

    const Params& params() const { return params_; }
    size_t most() const { return most_; }
    size_t size() const { return std::min(picks_ ? params_.n_picked() : params_.n_rows(), most_); }

    /// The number of the i-th of them.
    size_t row(size_t i) const {
        return picks_ ? std::min<size_t>(params_.picked(i), most_ - 1) : i;
    }

private:
    Params params_;
    bool picks_;
    size_t most_;
};

/// Sorts pairs by their experts, and cuts them into tiles.
class Sorting {
public:
    explicit Sorting(const Call& call)
        : layer_(call.count("layer")),
          row_words_(call.count("row_words")),
          columns_(call.count("tile_columns")),
          n_experts_(call.count("n_experts")),
          n_used_(call.count("n_used")),
          clears_(call.count("clears") != 0),
          rows_(call, call.n_words("routing") / std::max<size_t>(row_words_, 1)) {
        require(n_experts_ > 0 && n_used_ > 0 && row_words_ >= n_used_ && columns_ > 0, call,
                "there are no experts");
        require(call.count("n_places") == 0, call, "experts are where they are read");
        done_ = call.words<uint32_t>("done", n_experts_);
        routing_ = call.words<const uint32_t>("routing", 0);
        tiles_ = call.words<uint32_t>("tiles", kHeaderWords);
        most_tiles_ = (call.n_words("tiles") - kHeaderWords) / kTileWords;
        sorted_ = call.words<uint32_t>("sorted_pairs", rows_.most() * n_used_);
    }

    void run() const {
        if (clears_) {
            std::fill_n(done_, n_experts_, 0U);
            return;
        }
        const size_t n_rows = rows_.size();
        std::vector<uint32_t> next(n_experts_);  // pairs of an expert; then where its next one goes
        for (size_t i = 0; i < n_rows; ++i) {
            const size_t row = rows_.row(i);
            for (size_t rank = 0; rank < n_used_; ++rank) ++next[id(row, rank)];
        }
        place_experts(next);
        for (size_t i = 0; i < n_rows; ++i) {
            const size_t row = rows_.row(i);
            for (size_t rank = 0; rank < n_used_; ++rank) {
                uint32_t& to = next[id(row, rank)];
                if (to != kNoWord) sorted_[to++] = static_cast<uint32_t>(row * n_used_ + rank);
            }
        }
    }

private:
    uint32_t id(size_t row, size_t rank) const {
        return std::min<uint32_t>(routing_[row * row_words_ + rank],
                                  static_cast<uint32_t>(n_experts_) - 1);
    }

    /// Make counts of pairs to where they go, and write the tiles; an expert that takes no part is
    /// at kNoWord.
    void place_experts(std::vector<uint32_t>& counts) const {
        const auto* const table = reinterpret_cast<const uint64_t*>(rows_.params().expert_table());
        uint32_t n_pairs = 0, n_tiles = 0;
        for (size_t expert = 0; expert < n_experts_; ++expert) {
            const uint64_t address = table[layer_ * n_experts_ + expert] & ~kAtHome;
            const uint32_t n = counts[expert], first = n_pairs;
            counts[expert] = kNoWord;
            if (n == 0 || address == 0 || done_[expert] != 0) continue;
            for (size_t at = 0; at < n && n_tiles < most_tiles_; at += columns_, ++n_tiles) {
                const size_t in_tile = std::min<size_t>(columns_, n - at);
                const uint32_t words[] = {static_cast<uint32_t>(address),
                                          static_cast<uint32_t>(address >> 32),
                                          static_cast<uint32_t>(first + at),
                                          static_cast<uint32_t>(in_tile)};
                std::copy_n(words, kTileWords, tiles_ + kHeaderWords + kTileWords * n_tiles);
            }
            counts[expert] = first;
            n_pairs += n;
            done_[expert] = 1;
        }
        tiles_[0] = 0;
        std::fill_n(tiles_ + 1, kRounds, n_tiles);
    }

    size_t layer_, row_words_, columns_, n_experts_, n_used_;
    bool clears_;
    RowsTaken rows_;
    uint32_t *done_, *tiles_, *sorted_;
    const uint32_t* routing_;
    size_t most_tiles_;
};

}  // namespace

std::vector<Step> expert_tiles(const Call& call) {
    const Sorting sorting(call);
    return {{1, [=](size_t, size_t) { sorting.run(); }, false}};
}

std::vector<Step> expert_matmul_gate_up(const Call& call) {
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format), row_bytes = call.count("row_bytes");
    const size_t n_rows = call.count("n_rows"), x_stride = 4 * call.count("x_stride");
    const size_t pass = call.count("pass"), activation = call.count("activation");
    const bool is_biased = call.count("biased") != 0;
    const size_t gate_at = call.count("gate_offset"), up_at = call.count("up_offset");
    const size_t gate_bias_at = call.count("gate_bias"), up_bias_at = call.count("up_bias");
    const size_t n_used = call.count("pairs_of_x");
    require(n_rows > 0 && x_stride >= n_columns, call, "there is nothing to do");
    require(pass <= kUpOnly && activation < kActivations, call, "no such pass or activation");
    const Tiles tiles(call);
    const size_t most = (call.n_words("x") + x_stride - n_columns) / x_stride;
    const auto* const x = call.words<const float>("x", n_columns);
    const size_t most_pairs = call.n_words("y") / n_rows;
    auto* const y = call.words<float>("y", n_rows);

    const Inputs inputs(call, format, n_columns, most);
    const auto work = [=](const Tile& tile, size_t first, size_t n) {
        const TilePairs of(tiles, tile, n_used);
        const auto project = [&](size_t matrix_at, Products& products) {
            const uint8_t* const weights = part<uint8_t>(tile.expert, matrix_at);
            multiply(weights + first * row_bytes, row_bytes, n, inputs, of.inputs.data(), tile.n,
                     products);
        };
        Products &gates = first_products(), &ups = second_products();
        if (pass != kUpOnly) project(gate_at, gates);
        if (pass != kGateOnly) project(up_at, ups);
        const auto put = [&](Products& products, size_t i, size_t matrix_at, size_t bias_at,
                             float* to) {
            const float* const biases = part<float>(tile.expert, bias_at) + first;
            const float* const values = products.of(i);
            const float scale = scale_of(tile.expert, matrix_at);
            for (size_t row = 0; row < n; ++row) {
                const float value = values[row] * scale;
                to[row] = is_biased ? value + biases[row] : value;
            }
        };
        for (size_t i = 0; i < tile.n; ++i) {
            if (of.pairs[i] >= most_pairs) continue;
            float* const found = y + of.pairs[i] * n_rows + first;
            if (pass != kUpOnly) put(gates, i, gate_at, gate_bias_at, found);
            if (pass == kGateOnly) continue;
            put(ups, i, up_at, up_bias_at, ups.of(i));
            activate(found, ups.of(i), n, static_cast<Activation>(activation));
        }
    };
    const auto bring = [=](size_t row) {
        if (row < tiles.n_rows()) inputs.take(row, x + row * x_stride);
    };
    return by_tile(tiles, inputs, n_rows, bring, work);
}

std::vector<Step> expert_matmul_down(const Call& call) {
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format), row_bytes = call.count("row_bytes");
    const size_t n_rows = call.count("n_rows");
    const bool is_biased = call.count("biased") != 0;
    const size_t down_at = call.count("down_offset"), bias_at = call.count("down_bias");
    require(n_rows > 0, call, "there is nothing to do");
    const Tiles tiles(call);
    const size_t most = call.n_words("x") / n_columns;  // pairs
    const auto* const x = call.words<const float>("x", n_columns);
    const size_t most_pairs = std::min(most, call.n_words("y") / n_rows);
    auto* const y = call.words<float>("y", n_rows);

    const Inputs inputs(call, format, n_columns, most);
    const auto work = [=](const Tile& tile, size_t first, size_t n) {
        const TilePairs of(tiles, tile, 1);
        const float* const biases = part<float>(tile.expert, bias_at);
        Products& products = first_products();
        multiply(part<uint8_t>(tile.expert, down_at) + first * row_bytes, row_bytes, n, inputs,
                 of.inputs.data(), tile.n, products);
        for (size_t i = 0; i < tile.n; ++i) {
            if (of.pairs[i] >= most_pairs) continue;
            float* const found = y + of.pairs[i] * n_rows + first;
            const float* const values = products.of(i);
            const float scale = scale_of(tile.expert, down_at);
            for (size_t row = 0; row < n; ++row) {
                const float value = values[row] * scale;
                found[row] = is_biased ? value + biases[first + row] : value;
            }
        }
    };
    const auto bring = [=](size_t index) {
        const auto [first, end] = tiles.range();
        if (first + index >= end) return;
        const size_t pair = tiles.pair(first + index);
        if (pair < most) inputs.take(pair, x + pair * n_columns);
    };
    return by_tile(tiles, inputs, n_rows, bring, work);
}

std::vector<Step> combine_rows(const Call& call) {
    const size_t n_rows = call.groups[1], width = 4 * call.count("row_vec4s");
    const size_t n_used = call.count("n_used"), row_words = call.count("row_words");
    const bool is_shared = call.count("shared") != 0, is_partial = call.count("partial") != 0;
    const bool adds = call.count("adds") != 0;
    const auto weight_word = static_cast<uint32_t>(call.count("weight_word"));
    require(n_rows > 0 && width > 0 && n_used > 0, call, "there is nothing to do");
    const size_t n_words = weight_word != kNoWord ? std::max<size_t>(2 * n_used, weight_word + 1)
                                                  : 2 * n_used;
    const auto* const routing =
        call.words<const uint32_t>("routing", reach(n_rows, row_words, n_words));
    const auto* const done = call.words<const uint32_t>("done", 1);
    const size_t n_experts = call.n_words("done");
    const auto* const expert_out =
        call.words<const float>("expert_out", n_rows * n_used * width);
    const auto* const shared_out =
        call.words<const float>("shared_out", is_shared ? n_rows * width : 0);
    auto* const hidden = call.words<float>("hidden", n_rows * width);
    const RowsTaken rows(call, n_rows);

    const auto combine = [=](size_t i, size_t) {
        if (i >= rows.size()) return;
        const size_t row = rows.row(i);
        const uint32_t* const of_row = routing + row * row_words;
        const auto weight_at = [=](size_t word) {
            float weight;
            std::memcpy(&weight, of_row + word, sizeof weight);
            return weight;
        };
        std::vector<float> sums(width);
        for (size_t rank = 0; rank < n_used; ++rank) {
            const bool is_done = of_row[rank] < n_experts && done[of_row[rank]] != 0;
            if (is_partial && !is_done) continue;
            const float weight = is_done ? weight_at(n_used + rank)
                                         : std::numeric_limits<float>::quiet_NaN();
            const float* const out = expert_out + (row * n_used + rank) * width;
            for (size_t at = 0; at < width; ++at) sums[at] += weight * out[at];
        }
        const float weight = weight_word == kNoWord ? 1.0F : weight_at(weight_word);
        float* const updated = hidden + row * width;
        for (size_t at = 0; at < width; ++at) {
            updated[at] = adds ? updated[at] + sums[at] : sums[at];
            if (is_shared) updated[at] += weight * shared_out[row * width + at];
        }
    };
    return {{n_rows, combine, false}};
}

}  // namespace vkmoe
