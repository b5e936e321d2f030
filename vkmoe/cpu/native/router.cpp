// The choice of experts, and what is exchanged with the host: as router_topk.comp, finish.comp and
// pick_rows.comp do it.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "inputs.hpp"

namespace vkmoe {

namespace {

constexpr uint32_t kRenormalise = 1, kSigmoid = 2, kSharedGate = 4, kGather = 8;
constexpr uint64_t kAtHome = 1;  // in the low bit of an entry
constexpr size_t kMaxUsed = 32;
constexpr float kLargest = std::numeric_limits<float>::max();

/// A logit that can be compared and subtracted: NaN counts as the lowest, as infinities do as the
/// largest and lowest numbers.
float finite(float value) {
    if (std::isnan(value)) return -kLargest;
    return std::clamp(value, -kLargest, kLargest);
}

float sigmoid(float value) {
    return 1.0F / (1.0F + std::exp(std::clamp(-value, -80.0F, 80.0F)));
}

/// What a layer's router is, the same for all rows.
struct Router {
    size_t n_experts, n_used, n_groups, n_groups_used, layer, first_landing, n_landing;
    uint32_t flags;
    float scale;
    const float* bias;    // of the choice, not of weights; null: none
    const float* scales;  // of what experts give; null: none

    bool has(uint32_t flag) const { return (flags & flag) != 0; }

    /// Whether scores decide: their order is that of the logits until something is added to them.
    bool by_score() const { return bias != nullptr || (has(kSigmoid) && n_groups > 1); }

    /// The weight before it is divided; for softmax relative to the largest logit.
    float gate(float value, float top) const {
        return has(kSigmoid) ? sigmoid(value) : std::exp(std::max(value - top, -120.0F));
    }
};

/// What numerators are relative to, and what they are divided by.
struct Total {
    float top, sum;
};

template <class Values>
Total total_of(const Router& router, const Values& values, size_t n) {
    float top = values[0], sum = 0.0F;
    for (size_t i = 1; i < n; ++i) top = std::max(top, values[i]);
    for (size_t i = 0; i < n; ++i) sum += router.gate(values[i], top);
    return {top, sum};
}

/// By which a group is chosen: its best key, for sigmoid the sum of its two best.
float group_key(const Router& router, const float* keys, size_t n) {
    float best = -std::numeric_limits<float>::infinity(), second = best;
    for (size_t i = 0; i < n; ++i) {
        second = std::max(second, std::min(best, keys[i]));
        best = std::max(best, keys[i]);
    }
    return router.has(kSigmoid) && n > 1 ? finite(best + second) : best;
}

/// Mark the experts of the best groups; of equal ones the lower.
void choose_groups(const Router& router, const std::vector<float>& keys, std::vector<char>& may) {
    const size_t n = router.n_experts / router.n_groups;
    std::vector<float> of_group(router.n_groups);
    for (size_t g = 0; g < router.n_groups; ++g) {
        of_group[g] = group_key(router, keys.data() + g * n, n);
    }
    for (size_t g = 0; g < router.n_groups; ++g) {
        size_t rank = 0;
        for (size_t i = 0; i < router.n_groups; ++i) {
            rank += of_group[i] > of_group[g] || (of_group[i] == of_group[g] && i < g);
        }
        if (rank >= router.n_groups_used) std::fill_n(may.begin() + g * n, n, char{0});
    }
}

/// The ids of the largest keys, the largest first; of equal ones the lower id.
void choose(const Router& router, const std::vector<float>& keys, std::vector<char>& may,
            uint32_t* ids) {
    for (size_t s = 0; s < router.n_used; ++s) {
        size_t best = router.n_experts;
        for (size_t e = 0; e < router.n_experts; ++e) {
            if (may[e] && (best == router.n_experts || keys[e] > keys[best])) best = e;
        }
        ids[s] = static_cast<uint32_t>(std::min(best, router.n_experts - 1));
        may[ids[s]] = 0;
    }
}

void put_address(uint32_t* words, uint64_t address) {
    words[0] = static_cast<uint32_t>(address);
    words[1] = static_cast<uint32_t>(address >> 32);
}

/// Addresses of used experts, and their partners, as the table has them.
void look_up(const Router& router, const uint64_t* table, bool may_land, const uint32_t* ids,
             uint32_t* addresses, uint32_t* partners) {
    size_t n_at_home = 0;
    for (size_t s = 0; s < router.n_used; ++s) {
        const uint64_t entry = table[router.layer * router.n_experts + ids[s]];
        const bool is_at_home = (entry & kAtHome) != 0;
        uint64_t place = entry & ~kAtHome, partner = 0;
        if (is_at_home && may_land && n_at_home < router.n_landing) {
            partner = table[router.first_landing + n_at_home];
        }
        n_at_home += is_at_home;
        if (router.has(kGather) && partner != 0) std::swap(place, partner);
        put_address(addresses + 2 * s, place);
        put_address(partners + 2 * s, partner);
    }
}

}  // namespace

std::vector<Step> router_topk(const Call& call) {
    Router router{call.count("n_experts"), call.count("n_used"), call.count("n_groups"),
                  call.count("n_groups_used"), call.count("layer"), call.count("first_landing"),
                  call.count("n_landing"), static_cast<uint32_t>(call.count("flags")),
                  call.real("scale"), nullptr, nullptr};
    require(router.n_used > 0 && router.n_used <= std::min(router.n_experts, kMaxUsed), call,
            "not so many experts can be used");
    require(router.n_groups > 0 && router.n_experts % router.n_groups == 0 &&
                router.n_groups_used > 0 && router.n_groups_used <= router.n_groups,
            call, "the groups do not hold the experts");
    router.bias = floats(call, "selection_bias", router.n_experts);
    router.scales = floats(call, "output_scales", router.n_experts);
    const size_t n_rows = call.groups[2], n_used = router.n_used;
    const size_t logits_pitch = call.count("logits_pitch");
    const size_t routing_pitch = call.count("routing_pitch"), first_id = call.count("first_id");
    const bool is_shared = router.has(kSharedGate);
    require(n_rows > 0, call, "there is nothing to do");
    const auto* const logits = call.words<const float>(
        "logits", reach(n_rows, logits_pitch, router.n_experts + is_shared));
    auto* const routing =
        call.words<uint32_t>("routing", reach(n_rows, routing_pitch, 6 * n_used + is_shared));
    auto* const log = call.words<uint32_t>("log", first_id + n_rows * n_used);
    const Params params(call, n_rows);

    const auto route = [=](size_t row, size_t) {
        uint32_t* const found = routing + row * routing_pitch;
        if (row >= params.n_rows()) {
            std::fill_n(found, 6 * n_used, 0U);
            return;
        }
        const float* const given = logits + row * logits_pitch;
        std::vector<float> values(router.n_experts), keys;
        std::transform(given, given + router.n_experts, values.begin(), finite);
        Total total{0.0F, 1.0F};
        if (!router.has(kSigmoid) && (router.by_score() || !router.has(kRenormalise))) {
            total = total_of(router, values, router.n_experts);
        }
        keys = values;
        for (size_t e = 0; router.by_score() && e < router.n_experts; ++e) {
            const float score = router.gate(values[e], total.top) / total.sum;
            keys[e] = finite(score + (router.bias != nullptr ? router.bias[e] : 0.0F));
        }
        std::vector<char> may(router.n_experts, 1);
        if (router.n_groups > 1) choose_groups(router, keys, may);
        choose(router, keys, may, found);
        std::array<float, kMaxUsed> chosen{};
        for (size_t s = 0; s < n_used; ++s) chosen[s] = values[found[s]];
        if (router.has(kRenormalise)) total = total_of(router, chosen, n_used);
        for (size_t s = 0; s < n_used; ++s) {
            const float share = total.sum > 0.0F ? router.gate(chosen[s], total.top) / total.sum
                                                 : 1.0F / static_cast<float>(n_used);
            float weight = share * router.scale;
            if (router.scales != nullptr) weight *= router.scales[found[s]];
            std::memcpy(found + n_used + s, &weight, sizeof weight);
            log[first_id + row * n_used + s] = found[s];
        }
        const auto* const table = reinterpret_cast<const uint64_t*>(params.expert_table());
        look_up(router, table, row == params.landing_row(), found, found + 2 * n_used,
                found + 4 * n_used);
        if (is_shared) {
            const float weight = sigmoid(finite(given[router.n_experts]));
            std::memcpy(found + 6 * n_used, &weight, sizeof weight);
        }
    };
    return {{n_rows, route, false}};
}

std::vector<Step> find_experts(const Call& call) {
    const size_t n_experts = call.count("n_experts"), n_used = call.count("n_used");
    const size_t n_rows = call.groups[2], pitch = call.count("routing_pitch");
    const size_t layer = call.count("layer");
    require(n_used > 0 && n_used <= std::min(n_experts, kMaxUsed) && n_rows > 0, call,
            "there is nothing to do");
    auto* const routing = call.words<uint32_t>("routing", reach(n_rows, pitch, 6 * n_used));
    const Params params(call, n_rows);
    const auto find = [=](size_t row, size_t) {
        uint32_t* const words = routing + row * pitch;
        const auto* const table = reinterpret_cast<const uint64_t*>(params.expert_table());
        std::array<uint32_t, 2 * kMaxUsed> before;
        std::array<uint64_t, kMaxUsed> places{};
        std::copy_n(words, 2 * n_used, before.begin());
        for (size_t s = 0; s < n_used && row < params.n_rows(); ++s) {
            const size_t id = std::min<size_t>(before[s], n_experts - 1);
            places[s] = table[layer * n_experts + id] & ~kAtHome;
        }
        size_t slot = 0;
        for (const bool is_found : {true, false}) {
            for (size_t s = 0; s < n_used; ++s) {
                if ((places[s] != 0) != is_found) continue;
                words[slot] = before[s];
                words[n_used + slot] = before[n_used + s];
                put_address(words + 2 * n_used + 2 * slot, places[s]);
                put_address(words + 4 * n_used + 2 * slot, 0);
                ++slot;
            }
        }
    };
    return {{n_rows, find, false}};
}

std::vector<Step> finish(const Call& call) {
    const Params params(call, 0);
    auto* const log = call.words<uint32_t>("log", 2);
    const auto prove = [=](size_t, size_t) {
        log[1] = log[0] == params.serial() ? log[1] + 1 : 1;
        log[0] = params.serial();
    };
    return {{1, prove, false}};
}

std::vector<Step> pick_rows(const Call& call) {
    const size_t n_rows = call.groups[2], n_words = 4 * call.count("row_vec4s");
    const size_t x_pitch = 4 * call.count("x_pitch"), y_pitch = 4 * call.count("y_pitch");
    require(n_rows > 0 && n_words > 0, call, "there is nothing to do");
    const Params params(call, n_rows);
    const auto x_words = call.tensors.at("x").n_words;
    const auto* const x = call.words<const uint32_t>("x", n_words);
    auto* const y = call.words<uint32_t>("y", reach(n_rows, y_pitch, n_words));
    const auto pick = [=](size_t row, size_t) {
        if (params.n_rows() == 0) return;
        const size_t last = params.n_rows() - 1, at = std::min(params.first_picked() + row, last);
        const size_t picked = std::min<size_t>(params.picked(at), last);
        if (picked * x_pitch + n_words > x_words) return;  // no row of the tensor
        std::memcpy(y + row * y_pitch, x + picked * x_pitch, n_words * sizeof(uint32_t));
    };
    return {{n_rows, pick, false}};
}

}  // namespace vkmoe
