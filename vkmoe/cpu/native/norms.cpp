// The norms behind blocks, as norm_residual.comp does them: what the parts of a block gave is normed,
// added to the hidden state, and left for the next norm.
#include "kernels.hpp"

#include <cmath>
#include <string>
#include <vector>

#include "inputs.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

/// Rows of what a part of a block gave, with the gain of its own norm; null: it has none.
struct Part {
    const float *rows, *gain;
    size_t pitch;

    Part(const Call& call, const std::string& name, size_t n_rows, size_t width)
        : gain(floats(call, (name + "_gain").c_str(), width)),
          pitch(4 * call.count(name + "_pitch")) {
        rows = call.words<const float>(name, reach(n_rows, pitch, width));
    }

    /// sums += the row, normed where it has a gain.
    void add(size_t row, size_t width, float eps, float* sums) const {
        const float* const values = rows + row * pitch;
        if (gain == nullptr) return add_scaled(sums, 1.0F, values, width);
        const float mean = dot(values, values, width) / static_cast<float>(width);
        const float factor = 1.0F / std::sqrt(mean + eps);
        for (size_t i = 0; i < width; ++i) sums[i] += values[i] * factor * gain[i];
    }
};

}  // namespace

std::vector<Step> norm_residual(const Call& call) {
    const size_t n_rows = call.groups[1] * call.groups[2], width = 4 * call.count("row_vec4s");
    const size_t hidden_pitch = call.count("hidden_pitch");
    const size_t partials_pitch = call.count("partials_pitch");
    const float eps = call.real("eps");
    require(n_rows > 0 && width > 0, call, "there is nothing to do");
    std::vector<Part> parts{{call, "a", n_rows, width}};
    if (call.count("n_parts") == 2) parts.emplace_back(call, "b", n_rows, width);
    const float* const norm_gain = floats(call, "norm_gain", width);
    const float* const gain = floats(call, "gain", width);
    const float* const scale = floats(call, "scale", 1);
    require(norm_gain != nullptr, call, "the gain has no address");
    const size_t n_left = gain != nullptr ? width : 0;
    auto* const hidden = call.words<float>("hidden", reach(n_rows, hidden_pitch, width));
    auto* const gained = call.words<float>("gained", reach(n_rows, hidden_pitch, n_left));
    auto* const partials =
        call.words<float>("partials", gain != nullptr ? reach(n_rows, partials_pitch, 1) : 0);

    const auto work = [=](size_t row, size_t) {
        std::vector<float> sums(width);
        for (const Part& part : parts) part.add(row, width, eps, sums.data());
        const float mean = dot(sums.data(), sums.data(), width) / static_cast<float>(width);
        const float factor = 1.0F / std::sqrt(mean + eps);
        const float scaling = scale != nullptr ? *scale : 1.0F;
        float* const found = hidden + row * hidden_pitch;
        for (size_t i = 0; i < width; ++i) {
            found[i] = scaling * (found[i] + sums[i] * factor * norm_gain[i]);
        }
        if (gain == nullptr) return;
        float* const left = gained + row * hidden_pitch;
        for (size_t i = 0; i < width; ++i) left[i] = found[i] * gain[i];
        partials[row * partials_pitch] = dot(found, found, width);
    };
    return {{n_rows, work, false}};
}

}  // namespace vkmoe
