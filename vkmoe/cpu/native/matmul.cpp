// Products of quantised matrices and all rows of a prompt's batch, as matmul.comp does them.
#include "kernels.hpp"

#include <algorithm>
#include <array>

#include "inputs.hpp"
#include "products.hpp"

namespace vkmoe {

namespace {

/// Numbers of vectors, one behind the other.
class Numbers {
public:
    Numbers(size_t first, size_t step, size_t n) {
        for (size_t i = 0; i < n; ++i) values_[i] = static_cast<uint32_t>(first + i * step);
    }

    const uint32_t* data() const { return values_.data(); }

private:
    std::array<uint32_t, kTileVectors> values_;
};

std::vector<Step> multiplied(const Call& call, bool adds) {  // to y, which is not read else
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format), n_heads = call.groups[2];
    const Matrices matrices(call, n_heads);
    const size_t n_outputs = matrices.n_rows(), row_bytes = call.count("row_bytes");
    const size_t x_offset = 4 * call.count("x_offset"), x_stride = 4 * call.count("x_stride");
    const size_t head_stride = 4 * call.count("x_head_stride");
    const size_t y_offset = call.count("y_offset"), y_stride = call.count("y_stride");
    const size_t columns = call.count("lane_dots") * call.count("lane_columns");
    require(columns > 0 && columns <= kTileVectors, call, "tiles are too wide");
    const size_t n_windows = call.groups[0];
    require(n_windows > 0 && x_stride > 0, call, "there is nothing to do");
    // The rows of the batch are those that the tensors have room for, up to whole tiles.
    const size_t n_x = x_offset + (n_heads - 1) * head_stride + n_columns;
    const size_t n_y = y_offset + n_heads * n_outputs;
    const size_t x_words = call.n_words("x");
    require(x_words >= n_x, call, "a row of x is too short");
    const size_t most = std::min({n_windows * columns, (x_words - n_x) / x_stride + 1,
                                  Params::most_rows(call)});
    const auto* const x = call.words<const float>("x", reach(most, x_stride, n_x));
    const size_t y_words = call.n_words("y");
    auto* const y = call.words<float>("y", n_y);
    const Params params(call, most);
    const float* const bias = floats(call, "bias", n_heads * n_outputs);
    const auto n_rows = [=] { return std::min(params.n_rows(), most); };

    const Inputs inputs(call, format, n_columns, most * n_heads);
    const auto bring = [=](size_t item, size_t) {
        const size_t row = item / n_heads, head = item % n_heads;
        if (row >= n_rows()) return;
        inputs.take(item, x + row * x_stride + x_offset + head * head_stride);
    };
    const size_t n_groups = ceil_divide(n_outputs, kTileRows);
    const auto multiply_group = [=](size_t item, size_t) {
        const size_t head = item / (n_groups * n_windows), group = item / n_windows % n_groups;
        const size_t first_row = item % n_windows * columns;
        if (first_row >= n_rows()) return;
        const size_t n = std::min(columns, n_rows() - first_row);
        const Numbers numbers(first_row * n_heads + head, n_heads, n);
        const size_t end = std::min((group + 1) * kTileRows, n_outputs);
        for (size_t first = group * kTileRows; first < end;) {
            const size_t n_outputs_here = std::min(end, matrices.end(first)) - first;
            Products& products = first_products();
            multiply(matrices.row(head, first), row_bytes, n_outputs_here, inputs, numbers.data(),
                     n, products);
            for (size_t i = 0; i < n; ++i) {
                const size_t of_head = head * n_outputs + first;
                const size_t at = (first_row + i) * y_stride + y_offset + of_head;
                if (at + n_outputs_here > y_words) break;
                const float* const values = products.of(i);
                const float scale = matrices.scale(first);
                for (size_t output = 0; output < n_outputs_here; ++output) {
                    float value = values[output] * scale;
                    if (bias != nullptr) value += bias[of_head + output];
                    y[at + output] = adds ? y[at + output] + value : value;
                }
            }
            first += n_outputs_here;
        }
    };
    return {{most * n_heads, bring, false}, {n_heads * n_groups * n_windows, multiply_group, true}};
}

}  // namespace

std::vector<Step> matmul(const Call& call) { return multiplied(call, false); }

std::vector<Step> matmul_residual(const Call& call) {
    return multiplied(call, call.count("adds") != 0);
}

}  // namespace vkmoe
