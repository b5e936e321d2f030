// What layers with a recurrent state need, as delta_inputs.comp, delta_step.comp and gate_heads.comp
// do it.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "inputs.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kWhole = 0, kRead = 1, kStore = 2;  // modes of delta_inputs.comp
constexpr size_t kRingRows = 16;                     // recurrent.glsl
constexpr float kEps = 1e-6F;

/// Heads of keys and of values, whose channels follow one another: q, k, v.
struct DeltaHeads {
    size_t dim, n_keys, n_values;

    explicit DeltaHeads(const Call& call)
        : dim(call.count("head_dim")),
          n_keys(call.count("n_key_heads")),
          n_values(call.count("n_heads")) {
        require(dim > 0 && n_keys > 0 && n_values > 0 && n_values % n_keys == 0, call,
                "heads do not share keys");
    }

    size_t n_all() const { return 2 * n_keys + n_values; }
    size_t n_channels() const { return n_all() * dim; }
};

/// Whether a row is of the batch and of this region: rows of one stand together.
bool continues(const Params& params, size_t row, size_t region) {
    return row < params.n_rows() && params.region(row) == region;
}

/// What was projected last of each region, by position.
struct Ring {
    float* data;
    size_t n_regions, n_channels;

    Ring(const Call& call, size_t n_channels)
        : n_regions(call.count("n_regions")), n_channels(n_channels) {
        const size_t n_bytes = sizeof(float) * n_regions * kRingRows * n_channels;
        data = reinterpret_cast<float*>(const_cast<uint8_t*>(call.bytes("ring", n_bytes)));
        require(n_regions > 0 && data != nullptr, call, "the ring has no address");
    }

    float* row(size_t region, size_t position) const {
        const size_t index = std::min(region, n_regions - 1) * kRingRows + position % kRingRows;
        return data + index * n_channels;
    }
};

float softplus(float x) { return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x))); }

/// A dispatch that convolves: what it reads, and where it leaves what.
struct Convolution {
    DeltaHeads heads;
    size_t n_taps, beta_offset, alpha_offset, projected_pitch, mixed_pitch;
    Ring ring;
    Params params;
    const float *taps, *scales, *biases, *projected;
    float* mixed;

    Convolution(const Call& call, size_t n_rows)
        : heads(call),
          n_taps(call.count("n_taps")),
          beta_offset(call.count("beta_offset")),
          alpha_offset(call.count("alpha_offset")),
          projected_pitch(call.count("projected_pitch")),
          mixed_pitch(call.count("mixed_pitch")),
          ring(call, heads.n_channels()),
          params(call, n_rows),
          taps(floats(call, "taps", heads.n_channels() * n_taps)),
          scales(floats(call, "scales", heads.n_values)),
          biases(floats(call, "biases", heads.n_values)) {
        require(n_rows > 0 && n_taps > 0, call, "there is nothing to do");
        require(taps != nullptr && scales != nullptr && biases != nullptr, call,
                "a vector has no address");
        const size_t end = std::max(heads.n_channels(), std::max(beta_offset, alpha_offset) + heads.n_values);
        projected = call.words<const float>("projected", reach(n_rows, projected_pitch, end));
        const size_t n_words = heads.n_channels() + 2 * heads.n_values;
        mixed = call.words<float>("mixed", reach(n_rows, mixed_pitch, n_words));
    }

    /// Channels of what was projected some rows before this one; null before the first.
    const float* earlier(size_t row, size_t n_before) const {
        const size_t position = params.position(row), region = params.region(row);
        if (n_before > position) return nullptr;
        if (n_before <= row && continues(params, row - n_before, region)) {
            return projected + (row - n_before) * projected_pitch;
        }
        return ring.row(region, position - n_before);
    }

    void store(size_t row, size_t head) const {
        float* const target = ring.row(params.region(row), params.position(row));
        const float* const given = projected + row * projected_pitch;
        std::copy_n(given + head * heads.dim, heads.dim, target + head * heads.dim);
    }

    void convolve(size_t row, size_t head) const {
        const size_t dim = heads.dim, first = head * dim;
        float* const found = mixed + row * mixed_pitch + first;
        std::vector<float> sums(dim);
        for (size_t j = 0; j < n_taps; ++j) {
            const float* const x = earlier(row, n_taps - 1 - j);
            if (x == nullptr) continue;
            for (size_t i = 0; i < dim; ++i) sums[i] += taps[(first + i) * n_taps + j] * x[first + i];
        }
        std::copy(sums.begin(), sums.end(), found);
        gate(found, sums.data(), dim, false);
        if (head >= 2 * heads.n_keys) return store_gates(row, head - 2 * heads.n_keys);
        float factor = 1.0F / std::sqrt(dot(found, found, dim) + kEps);
        if (head < heads.n_keys) factor /= std::sqrt(static_cast<float>(dim));
        for (size_t i = 0; i < dim; ++i) found[i] *= factor;
    }

    void store_gates(size_t row, size_t head) const {
        const float* const given = projected + row * projected_pitch;
        float* const found = mixed + row * mixed_pitch + heads.n_channels();
        const float rise = softplus(given[alpha_offset + head] + biases[head]);
        found[head] = std::exp(scales[head] * rise);
        found[heads.n_values + head] = 1.0F / (1.0F + std::exp(-given[beta_offset + head]));
    }
};

/// The states of each region, behind its last positions.
struct States {
    float* data;
    size_t n_regions, n_versions, head_floats, n_heads;

    States(const Call& call, const DeltaHeads& heads)
        : n_regions(call.groups[2]),
          n_versions(call.count("n_versions")),
          head_floats(heads.dim * heads.dim),
          n_heads(heads.n_values) {
        const size_t n_bytes = sizeof(float) * n_regions * n_versions * n_heads * head_floats;
        data = reinterpret_cast<float*>(const_cast<uint8_t*>(call.bytes("states", n_bytes)));
        require(n_versions > 0 && n_regions > 0 && data != nullptr, call, "states have no address");
    }

    float* behind(size_t region, size_t position, size_t head) const {
        return data + ((region * n_versions + position % n_versions) * n_heads + head) * head_floats;
    }
};

}  // namespace

std::vector<Step> delta_inputs(const Call& call) {
    const size_t n_rows = call.groups[1], mode = call.count("mode");
    require(mode <= kStore, call, "no such mode");
    const Convolution of(call, n_rows);
    const size_t n_heads = of.heads.n_all();
    const auto work = [=](size_t item, size_t) {
        const size_t row = item / n_heads, head = item % n_heads;
        if (row >= of.params.n_rows()) return;
        const bool is_last = !continues(of.params, row + kRingRows, of.params.region(row));
        if (mode == kWhole || (mode == kStore && is_last)) of.store(row, head);
        if (mode != kStore) of.convolve(row, head);
    };
    return {{n_rows * n_heads, work, false}};
}

std::vector<Step> delta_step(const Call& call) {
    const DeltaHeads heads(call);
    const States states(call, heads);
    const size_t n_rows = Params::most_rows(call), dim = heads.dim, n_values = heads.n_values;
    const size_t n_decays = call.count("n_decays"), mixed_pitch = call.count("mixed_pitch");
    const size_t out_pitch = call.count("out_pitch"), group = n_values / heads.n_keys;
    const bool tiled = call.count("tiled") != 0;
    require(n_rows > 0 && (n_decays == 1 || n_decays == dim), call, "no such decays");
    const Params params(call, n_rows);
    const size_t gates = heads.n_channels(), n_words = gates + n_values * (n_decays + 1);
    const auto* const mixed = call.words<const float>("mixed", reach(n_rows, mixed_pitch, n_words));
    auto* const out = call.words<float>("out", reach(n_rows, out_pitch, n_values * dim));

    const auto step = [=](size_t row, size_t region, size_t head) {
        const size_t position = params.position(row);
        const size_t key_head = tiled ? head % heads.n_keys : head / group;
        const float* const of_row = mixed + row * mixed_pitch;
        const float* const q = of_row + key_head * dim;
        const float* const k = q + heads.n_keys * dim;
        const float* const v = of_row + (2 * heads.n_keys + head) * dim;
        const float* const decays = of_row + gates + head * n_decays;
        const float beta = of_row[gates + n_values * n_decays + head];
        const float* const before = position > 0 ? states.behind(region, position - 1, head) : nullptr;
        float* const state = states.behind(region, position, head);
        if (before == nullptr) std::fill_n(state, dim * dim, 0.0F);
        float* const found = out + row * out_pitch + head * dim;
        std::vector<float> by_key(dim);
        std::fill_n(found, dim, 0.0F);
        for (size_t d = 0; d < dim; ++d) {
            const float decay = decays[n_decays == 1 ? 0 : d];
            const float* const from = before != nullptr ? before : state;
            fade(from + d * dim, decay, dim, state + d * dim);
            add_scaled(by_key.data(), k[d], state + d * dim, dim);
            add_scaled(found, q[d], state + d * dim, dim);
        }
        for (size_t i = 0; i < dim; ++i) by_key[i] = beta * (v[i] - by_key[i]);
        for (size_t d = 0; d < dim; ++d) add_scaled(state + d * dim, k[d], by_key.data(), dim);
        add_scaled(found, dot(q, k, dim), by_key.data(), dim);
    };
    const auto work = [=](size_t item, size_t) {
        const size_t region = item / n_values, head = item % n_values;
        size_t row = 0;
        while (row < params.n_rows() && params.region(row) != region) ++row;
        for (; continues(params, row, region); ++row) step(row, region, head);
    };
    return {{states.n_regions * n_values, work, false}};
}

std::vector<Step> gate_heads(const Call& call) {
    const size_t n_heads = call.groups[0], n_rows = call.groups[2], dim = call.count("head_dim");
    const size_t offset = call.count("gates_offset"), gates_pitch = call.count("gates_pitch");
    const size_t heads_pitch = call.count("heads_pitch");
    const bool is_silu = call.count("is_silu") != 0;
    const float eps = call.real("eps");
    require(n_heads > 0 && n_rows > 0 && dim > 0, call, "there is nothing to do");
    const Params params(call, n_rows);
    const float* const gain = floats(call, "gain", dim);
    auto* const heads = call.words<float>("heads", reach(n_rows, heads_pitch, n_heads * dim));
    const auto* const gates =
        call.words<const float>("gates", reach(n_rows, gates_pitch, offset + n_heads * dim));
    const auto work = [=](size_t item, size_t) {
        const size_t row = item / n_heads, head = item % n_heads;
        if (row >= params.n_rows()) return;
        float* const found = heads + row * heads_pitch + head * dim;
        if (gain != nullptr) {
            const float mean = dot(found, found, dim) / static_cast<float>(dim);
            const float factor = 1.0F / std::sqrt(mean + eps);
            for (size_t i = 0; i < dim; ++i) found[i] *= gain[i] * factor;
        }
        gate(found, gates + row * gates_pitch + offset + head * dim, dim, is_silu);
    };
    return {{n_rows * n_heads, work, false}};
}

}  // namespace vkmoe
