// Products of quantised matrices and vectors, with what comes before and after them: the lookup of
// embeddings, norms, and gates of what a token brings to a layer.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "inputs.hpp"
#include "vectors.hpp"

namespace vkmoe {

std::vector<Step> matvec(const Call& call) {
    constexpr size_t kFewestItems = 16;  // of a small matrix, such as a router: threads share it too
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format);
    const size_t n_rows = call.count("n_rows");
    const size_t rows = std::min(call.count("rows"), ceil_divide(n_rows, kFewestItems));
    const size_t n_vectors = call.groups[2] * call.count("columns");
    const size_t x_stride = 4 * call.count("x_stride"), x_offset = 4 * call.count("x_offset");
    const size_t n_heads = x_stride != 0 ? call.groups[1] : 1;
    const size_t x_pitch = 4 * call.count("x_pitch"), y_pitch = call.count("y_pitch");
    const size_t first_y = call.count("output_offset");
    require(rows > 0 && n_vectors > 0, call, "there is nothing to do");
    const Matrices matrices(call, n_heads);
    const float* const bias = floats(call, "bias", first_y + n_heads * n_rows);
    const size_t n_x = x_offset + (n_heads - 1) * x_stride + n_columns;
    const auto* const x = call.words<const float>("x", reach(n_vectors, x_pitch, n_x));
    auto* const y = call.words<float>("y", reach(n_vectors, y_pitch, first_y + n_heads * n_rows));
    const Norm norm(call, n_vectors);

    const Inputs inputs(call, format, n_columns, n_vectors * n_heads);
    const auto scales = std::make_shared<std::vector<float>>(n_vectors);
    const size_t n_parts = inputs.n_parts();
    const auto bring = [=](size_t item, size_t) {
        const size_t index = item / n_parts, part = item % n_parts;
        const size_t vector = index / n_heads, head = index % n_heads;
        inputs.take_part(index, part, x + vector * x_pitch + x_offset + head * x_stride);
        if (head == 0 && part == 0) (*scales)[vector] = norm.scale(vector);
    };
    const size_t n_groups = ceil_divide(n_rows, rows);
    const auto multiply = [=](size_t item, size_t) {
        const size_t head = item / n_groups, first = item % n_groups * rows;
        for (size_t row = first; row < std::min(first + rows, n_rows); ++row) {
            const uint8_t* const weights = matrices.row(head, row);
            const size_t at = first_y + head * n_rows + row;
            for (size_t vector = 0; vector < n_vectors; ++vector) {
                const float product = inputs.dot(weights, vector * n_heads + head);
                float value = product * matrices.scale(row) * (*scales)[vector];
                if (bias != nullptr) value += bias[at];
                y[vector * y_pitch + at] = value;
            }
        }
    };
    const size_t n_taken = n_vectors * n_heads * n_parts;
    return {{n_taken, bring, false}, {n_heads * n_groups, multiply, true}};
}

std::vector<Step> matvec_residual(const Call& call) {
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format), row_bytes = call.count("row_bytes");
    const size_t n_rows = call.count("n_rows"), rows = call.count("rows");
    const size_t n_vectors = call.groups[2] * call.count("columns");
    const size_t x_pitch = 4 * call.count("x_pitch"), hidden_pitch = call.count("hidden_pitch");
    const size_t partials_pitch = call.count("partials_pitch");
    const bool adds = call.count("adds") != 0;
    require(rows > 0 && n_vectors > 0 && n_rows > 0, call, "there is nothing to do");

    const size_t n_groups = ceil_divide(n_rows, rows);
    const uint8_t* const weights = call.bytes("weights", n_rows * row_bytes);
    const float scale = call.scale("weights");
    const float* const gain = floats(call, "gain", n_rows);
    const float* const bias = floats(call, "bias", n_rows);
    require(weights != nullptr && gain != nullptr, call, "a matrix or a gain has no address");
    const auto* const x = call.words<const float>("x", reach(n_vectors, x_pitch, n_columns));
    auto* const hidden = call.words<float>("hidden", reach(n_vectors, hidden_pitch, n_rows));
    auto* const gained = call.words<float>("gained", reach(n_vectors, hidden_pitch, n_rows));
    auto* const partials =
        call.words<float>("partials", reach(n_vectors, partials_pitch, n_groups));

    const Inputs inputs(call, format, n_columns, n_vectors);
    const size_t n_parts = inputs.n_parts();
    const auto bring = [=](size_t item, size_t) {
        const size_t vector = item / n_parts;
        inputs.take_part(vector, item % n_parts, x + vector * x_pitch);
    };
    const auto multiply = [=](size_t group, size_t) {
        const size_t first = group * rows, end = std::min(first + rows, n_rows);
        for (size_t vector = 0; vector < n_vectors; ++vector) {
            float squares = 0.0F;
            for (size_t row = first; row < end; ++row) {
                float added = inputs.dot(weights + row * row_bytes, vector) * scale;
                if (bias != nullptr) added += bias[row];
                const size_t at = vector * hidden_pitch + row;
                const float updated = adds ? hidden[at] + added : added;
                hidden[at] = updated;
                gained[at] = updated * gain[row];
                squares += updated * updated;
            }
            partials[vector * partials_pitch + group] = squares;
        }
    };
    return {{n_vectors * n_parts, bring, false}, {n_groups, multiply, true}};
}

std::vector<Step> embed(const Call& call) {
    constexpr size_t kChunk = 32;
    const Format& format = call.format();
    const size_t width = columns_of(call, format), row_bytes = call.count("row_bytes");
    const size_t n_vocab = call.count("n_vocab"), n_vectors = call.groups[2];
    const size_t hidden_pitch = call.count("hidden_pitch");
    const size_t partials_pitch = call.count("partials_pitch");
    const float scale = call.real("scale") * call.scale("embeddings");
    const size_t part = kChunk * call.count("workgroup_size"), n_parts = ceil_divide(width, part);
    require(n_vectors > 0 && n_vocab > 0, call, "there is nothing to do");
    require(part % format.block_weights == 0, call, "a workgroup ends within a block");

    const uint8_t* const embeddings = call.bytes("embeddings", n_vocab * row_bytes);
    const float* const gain = floats(call, "gain", width);
    require(embeddings != nullptr, call, "embeddings have no address");
    const Params params(call, n_vectors);
    auto* const hidden = call.words<float>("hidden", reach(n_vectors, hidden_pitch, width));
    auto* const gained = call.words<float>("gained", reach(n_vectors, hidden_pitch, width));
    auto* const partials = call.words<float>("partials", reach(n_vectors, partials_pitch, n_parts));

    const auto look_up = [=, &format](size_t item, size_t) {
        const size_t vector = item / n_parts, index = item % n_parts;
        if (vector >= params.n_rows()) return;
        const size_t token = params.token(vector);
        const uint8_t* const row = embeddings + std::min(token, n_vocab - 1) * row_bytes;
        const size_t first = index * part, n = std::min(part, width - first);
        float* const found = hidden + vector * hidden_pitch + first;
        const uint8_t* const weights = row + format.row_bytes(first);
        if (format.to_float != nullptr) {
            format.to_float(weights, found, static_cast<int64_t>(n));
        } else {
            std::memcpy(found, weights, n * sizeof(float));
        }
        for (size_t i = 0; i < n; ++i) found[i] *= scale;
        if (gain == nullptr) return;
        float squares = 0.0F;
        for (size_t i = 0; i < n; ++i) {
            gained[vector * hidden_pitch + first + i] = found[i] * gain[first + i];
            squares += found[i] * found[i];
        }
        partials[vector * partials_pitch + index] = squares;
    };
    return {{n_vectors * n_parts, look_up, false}};
}

std::vector<Step> gate_inputs(const Call& call) {
    const size_t n_vectors = call.groups[2], width = call.count("width");
    const size_t pitch = call.count("gates_pitch"), inputs_pitch = call.count("inputs_pitch");
    const size_t offset = call.count("inputs_offset");
    require(n_vectors > 0 && width > 0, call, "there is nothing to do");
    auto* const gates = call.words<float>("gates", reach(n_vectors, pitch, width));
    const auto* const inputs =
        call.words<const float>("inputs", reach(n_vectors, inputs_pitch, offset + width));
    const auto join = [=](size_t vector, size_t) {
        activate(gates + vector * pitch, inputs + vector * inputs_pitch + offset, width,
                 Activation::geglu);
    };
    return {{n_vectors, join, false}};
}

std::vector<Step> rms_norm(const Call& call) {
    const size_t n_vectors = call.groups[2], width = call.count("width");
    const size_t offset = call.count("x_offset");
    const size_t x_pitch = call.count("x_pitch"), y_pitch = call.count("y_pitch");
    const float eps = call.real("eps");
    require(n_vectors > 0 && width > 0, call, "there is nothing to do");
    const float* const gain = floats(call, "gain", width);
    require(gain != nullptr, call, "the gain has no address");
    const auto* const x = call.words<const float>("x", reach(n_vectors, x_pitch, offset + width));
    auto* const y = call.words<float>("y", reach(n_vectors, y_pitch, width));
    const auto normalise = [=](size_t vector, size_t) {
        const float* const values = x + vector * x_pitch + offset;
        float squares = 0.0F;
        for (size_t i = 0; i < width; ++i) squares += values[i] * values[i];
        const float scale = 1.0F / std::sqrt(squares / static_cast<float>(width) + eps);
        for (size_t i = 0; i < width; ++i) y[vector * y_pitch + i] = values[i] * scale * gain[i];
    };
    return {{n_vectors, normalise, false}};
}

}  // namespace vkmoe
