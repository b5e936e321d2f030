#include "inputs.hpp"

#include <cmath>
#include <stdexcept>

namespace vkmoe {

void require(bool holds, const Call& call, const char* what) {
    if (!holds) throw std::invalid_argument(call.variant + ": " + what);
}

size_t columns_of(const Call& call, const Format& format) {
    const size_t n_columns = call.count("n_blocks") * std::max<size_t>(32, format.block_weights);
    require(format.takes(n_columns), call, "a row is not of whole blocks");
    require(format.row_bytes(n_columns) <= call.count("row_bytes"), call, "rows overlap");
    return n_columns;
}

const float* floats(const Call& call, const char* name, size_t n) {
    return reinterpret_cast<const float*>(call.bytes(name, n * sizeof(float)));
}

void Inputs::take_part(size_t index, size_t part, const float* vector) const {
    const size_t first = part * kPartColumns, n = std::min(kPartColumns, n_columns_ - first);
    uint8_t* const target = at(index) + bytes(first);
    if (vnni_ == nullptr) return format_->quantise(vector + first, target, n);
    alignas(64) std::array<uint8_t, 2 * kPartColumns> rounded;
    format_->quantise(vector + first, rounded.data(), n);
    vnni_->arrange(rounded.data(), n, target);
}

void Inputs::dots(const uint8_t* row, const uint32_t* indices, size_t n, float* products) const {
    if (vnni_ == nullptr) {
        for (size_t i = 0; i < n; ++i) products[i] = dot(row, indices[i]);
        return;
    }
    std::array<const uint8_t*, kMostDots> inputs;
    for (size_t i = 0; i < n; ++i) inputs[i] = at(indices[i]);
    vnni_->multiply(row, n_columns_, inputs.data(), n, products);
}

Matrices::Matrices(const Call& call, size_t n_heads)
    : ends_{call.count("rows_end0"), call.count("rows_end1"), call.count("n_rows")},
      row_bytes_(call.count("row_bytes")) {
    require(n_heads > 0 && n_rows() > 0, call, "there is nothing to do");
    require(ends_[0] <= ends_[1] && ends_[1] <= ends_[2], call, "the matrices are not in order");
    require(n_heads == 1 || ends_[0] == n_rows(), call, "heads are not of one matrix");
    const char* const names[] = {"weights0", "weights1", "weights2"};
    for (size_t i = 0, before = 0; i < 3; before = ends_[i++]) {
        const size_t n_bytes = (i == 0 ? n_heads : 1) * (ends_[i] - before) * row_bytes_;
        first_[i] = call.bytes(names[i], n_bytes);
        scales_[i] = call.scale(names[i]);
        require(n_bytes == 0 || first_[i] != nullptr, call, "a matrix has no address");
    }
}

Norm::Norm(const Call& call, size_t n_vectors)
    : pitch_(call.count("partials_pitch")),
      n_(call.count("n_partials")),
      inverse_width_(call.real("inverse_width")),
      eps_(call.real("eps")) {
    partials_ = call.words<const float>("norm_partials", n_ != 0 ? reach(n_vectors, pitch_, n_) : 0);
}

float Norm::scale(size_t vector) const {
    if (n_ == 0) return 1.0F;
    float sum = 0.0F;
    for (size_t i = 0; i < n_; ++i) sum += partials_[vector * pitch_ + i];
    return 1.0F / std::sqrt(sum * inverse_width_ + eps_);
}

}  // namespace vkmoe
