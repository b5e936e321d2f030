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
