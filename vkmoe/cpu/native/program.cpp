#include "program.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels.hpp"

namespace vkmoe {

namespace {

constexpr size_t kCopiedAtOnce = 64 << 10;  // bytes

}  // namespace

void Program::dispatch(const std::string& kernel, const Call& call, bool waits) {
    std::vector<Step> steps = prepare(kernel, call);
    steps.front().waits = waits;
    for (Step& step : steps) append(std::move(step));
}

void Program::copy(const void* source, void* target, size_t n_bytes, bool waits) {
    const auto copy = [=](size_t item, size_t) {
        const size_t first = item * kCopiedAtOnce, n = std::min(kCopiedAtOnce, n_bytes - first);
        std::memcpy(static_cast<char*>(target) + first, static_cast<const char*>(source) + first, n);
    };
    append({(n_bytes + kCopiedAtOnce - 1) / kCopiedAtOnce, copy, waits});
}

void Program::fill(uint32_t* target, size_t n_words, uint32_t word, bool waits) {
    constexpr size_t kFilledAtOnce = kCopiedAtOnce / sizeof(uint32_t);
    const auto fill = [=](size_t item, size_t) {
        const size_t first = item * kFilledAtOnce;
        std::fill_n(target + first, std::min(kFilledAtOnce, n_words - first), word);
    };
    append({(n_words + kFilledAtOnce - 1) / kFilledAtOnce, fill, waits});
}

void Program::append(Step step) {
    if (step.n_items > Ranges::kMostItems) throw std::invalid_argument("a step has too many items");
    steps_.push_back(std::move(step));
}

}  // namespace vkmoe
