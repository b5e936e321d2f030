// The largest logits and their log-sum-exp, as candidates_partial.comp and candidates_merge.comp
// find them, and the cap of logits before, as in soft_cap.comp.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "inputs.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kTop = 64, kIdsAt = 4, kLogitsAt = 4 + kTop, kListWords = 4 + 2 * kTop;
constexpr size_t kMaximum = 0, kSum = 1, kCount = 2, kHasNan = 3;       // words of a list
constexpr size_t kOutCount = 0, kOutNan = 1, kOutLogSumExp = 2;         // of the result
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

using Item = std::pair<float, uint32_t>;  // a logit, which is a number, and its id

bool comes_first(const Item& one, const Item& other) {
    return one.first != other.first ? one.first > other.first : one.second < other.second;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float value_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// Write the first of `items`, in order; returns how many. What follows is of no id.
size_t write_top(std::vector<Item>& items, uint32_t* words) {
    const size_t n = std::min(kTop, items.size());
    std::partial_sort(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(n), items.end(),
                      comes_first);
    for (size_t i = 0; i < kTop; ++i) {
        words[kIdsAt + i] = i < n ? items[i].second : 0xFFFFFFFF;
        words[kLogitsAt + i] = bits_of(i < n ? items[i].first : -kInfinity);
    }
    return n;
}

/// The items of a chunk that can be among the largest: not below the least of some of them.
std::vector<Item> contenders(const float* logits, size_t first, size_t n) {
    constexpr size_t kSkipped = 64;  // logits that are passed by at once where none is large enough
    std::vector<Item> found;
    float least = -kInfinity;
    for (size_t i = 0; i < n; ++i) {
        if (i % kSkipped == 0 && found.size() >= kTop && i + kSkipped <= n &&
            !(largest(logits + first + i, kSkipped, least) > least)) {
            i += kSkipped - 1;
            continue;
        }
        const float raw = logits[first + i];
        const float value = std::isnan(raw) ? -kInfinity : raw + 0.0F;  // no -0
        if (found.size() >= kTop && !(value > least)) continue;
        found.emplace_back(value, static_cast<uint32_t>(first + i));
        if (found.size() == 4 * kTop) {
            std::nth_element(found.begin(), found.begin() + kTop - 1, found.end(), comes_first);
            found.resize(kTop);
            least = found.back().first;
        }
    }
    return found;
}

}  // namespace

std::vector<Step> soft_cap(const Call& call) {
    const size_t n_parts = call.groups[0], n_rows = call.groups[2], n_vocab = call.count("n_vocab");
    const size_t pitch = call.count("logits_pitch");
    const float most = call.real("cap");
    require(n_parts > 0 && n_rows > 0 && n_vocab > 0 && most > 0.0F, call, "there is nothing to do");
    auto* const logits = call.words<float>("logits", reach(n_rows, pitch, n_vocab));
    const size_t size = ceil_divide(n_vocab, n_parts);
    const auto cap = [=](size_t item, size_t) {
        const size_t row = item / n_parts, first = std::min(item % n_parts * size, n_vocab);
        soft_cap(logits + row * pitch + first, std::min(size, n_vocab - first), most);
    };
    return {{n_rows * n_parts, cap, false}};
}

std::vector<Step> candidates_partial(const Call& call) {
    const size_t n_lists = call.groups[0], n_rows = call.groups[2], n_vocab = call.count("n_vocab");
    const size_t logits_pitch = call.count("logits_pitch"), pitch = call.count("lists_pitch");
    require(n_lists > 0 && n_rows > 0 && n_vocab > 0, call, "there is nothing to do");
    const auto* const logits =
        call.words<const float>("logits", reach(n_rows, logits_pitch, n_vocab));
    auto* const lists = call.words<uint32_t>("lists", reach(n_rows, pitch, n_lists * kListWords));
    const size_t chunk = ceil_divide(n_vocab, n_lists);
    const auto list = [=](size_t item, size_t) {
        const size_t row = item / n_lists, index = item % n_lists;
        const size_t first = std::min(index * chunk, n_vocab), n = std::min(chunk, n_vocab - first);
        const float* const of_row = logits + row * logits_pitch;
        uint32_t* const words = lists + row * pitch + index * kListWords;
        std::vector<float> values(n);
        const bool has_nan = make_finite(of_row + first, n, values.data());
        const float top = largest(values.data(), n, -kLargest);
        words[kMaximum] = bits_of(top);
        words[kSum] = bits_of(exponentials(values.data(), n, top));
        words[kHasNan] = has_nan ? 1 : 0;
        std::vector<Item> items = contenders(of_row, first, n);
        words[kCount] = static_cast<uint32_t>(write_top(items, words));
    };
    return {{n_rows * n_lists, list, false}};
}

std::vector<Step> candidates_merge(const Call& call) {
    const size_t n_rows = call.groups[2], n_lists = call.count("n_lists");
    const size_t lists_pitch = call.count("lists_pitch"), pitch = call.count("candidates_pitch");
    require(n_rows > 0 && n_lists > 0, call, "there is nothing to do");
    const auto* const lists =
        call.words<const uint32_t>("lists", reach(n_rows, lists_pitch, n_lists * kListWords));
    auto* const candidates =
        call.words<uint32_t>("candidates", reach(n_rows, pitch, kListWords));
    const auto merge = [=](size_t row, size_t) {
        const uint32_t* const of_row = lists + row * lists_pitch;
        uint32_t* const found = candidates + row * pitch;
        std::vector<Item> items;
        float top = -kLargest, sum = 0.0F;
        bool has_nan = false;
        for (size_t l = 0; l < n_lists; ++l) {
            const uint32_t* const list = of_row + l * kListWords;
            top = std::max(top, value_of(list[kMaximum]));
            has_nan = has_nan || list[kHasNan] != 0;
            for (size_t i = 0; i < std::min<size_t>(list[kCount], kTop); ++i) {
                items.emplace_back(value_of(list[kLogitsAt + i]), list[kIdsAt + i]);
            }
        }
        for (size_t l = 0; l < n_lists; ++l) {
            const uint32_t* const list = of_row + l * kListWords;
            sum += value_of(list[kSum]) * std::exp(value_of(list[kMaximum]) - top);
        }
        found[kOutCount] = static_cast<uint32_t>(write_top(items, found));
        found[kOutNan] = has_nan ? 1 : 0;
        found[kOutLogSumExp] = bits_of(top + std::log(sum));
        found[3] = 0;
    };
    return {{n_rows, merge, false}};
}

}  // namespace vkmoe
