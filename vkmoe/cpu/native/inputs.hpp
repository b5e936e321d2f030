// What kernels have in common: parameters of a batch, rounded vectors, the scale of a fused norm.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "call.hpp"
#include "formats.hpp"

namespace vkmoe {

void require(bool holds, const Call& call, const char* what);

inline size_t ceil_divide(size_t n, size_t by) { return (n + by - 1) / by; }

/// Columns of a matrix: kernels count chunks of 32 where a type has no blocks.
size_t columns_of(const Call& call, const Format& format);

/// Words of a tensor whose vectors lie a pitch apart, up to the end of the last one.
inline size_t reach(size_t n_vectors, size_t pitch, size_t n_words) {
    return (n_vectors - 1) * pitch + n_words;
}

/// Floats at the address of that name; null where it is 0.
const float* floats(const Call& call, const char* name, size_t n);

/// The parameters of a batch, as shaders/include/params.glsl lays them out.
class Params {
public:
    Params(const Call& call, size_t n_rows)
        : words_(call.words<const uint32_t>("params", kHeaderWords + kRowWords * n_rows)) {}

    /// How many rows of a batch the parameters of a dispatch have room for.
    static size_t most_rows(const Call& call) {
        const size_t n_words = call.n_words("params");
        return n_words > kHeaderWords ? (n_words - kHeaderWords) / kRowWords : 0;
    }

    uint64_t expert_table() const { return words_[0] | static_cast<uint64_t>(words_[1]) << 32; }
    uint32_t serial() const { return words_[2]; }
    size_t n_rows() const { return words_[3]; }
    size_t landing_row() const { return words_[4]; }
    size_t n_picked() const { return words_[5]; }
    size_t first_picked() const { return words_[6]; }
    uint32_t token(size_t row) const { return of(row)[0]; }
    uint32_t position(size_t row) const { return of(row)[1]; }
    uint32_t region(size_t row) const { return of(row)[2]; }
    uint32_t picked(size_t row) const { return of(row)[3]; }

private:
    static constexpr size_t kHeaderWords = 8, kRowWords = 4;

    const uint32_t* of(size_t row) const { return words_ + kHeaderWords + kRowWords * row; }

    const uint32_t* words_;
};

/// Vectors in the form that a type of weights is multiplied by, in a dispatch's scratch.
class Inputs {
public:
    Inputs(const Call& call, const Format& format, size_t n_columns, size_t n)
        : format_(&format),
          vnni_(format.vnni),
          n_columns_(n_columns),
          n_(n),
          stride_(bytes(n_columns)),
          scratch_(call.scratch),
          first_(scratch_->take(n * stride_)) {}

    const Format& format() const { return *format_; }
    size_t n_columns() const { return n_columns_; }
    size_t size() const { return n_; }
    size_t stride() const { return stride_; }
    uint8_t* at(size_t index) const { return scratch_->data() + first_ + index * stride_; }

    void take(size_t index, const float* vector) const {
        for (size_t part = 0; part < n_parts(); ++part) take_part(index, part, vector);
    }

    /// Parts of a vector that threads can take side by side: the others wait for the only one that
    /// takes it whole, and fall asleep.
    size_t n_parts() const { return ceil_divide(n_columns_, kPartColumns); }

    void take_part(size_t index, size_t part, const float* vector) const;

    /// The product of a row of weights and an input.
    float dot(const uint8_t* row, size_t index) const {
        if (vnni_ == nullptr) return format_->dot(row, at(index), n_columns_);
        const uint8_t* const input = at(index);
        float product;
        vnni_->multiply(row, n_columns_, &input, 1, &product);
        return product;
    }

    /// The products of a row and up to kMostDots inputs of these numbers, each as `dot` has it.
    void dots(const uint8_t* row, const uint32_t* indices, size_t n, float* products) const;

    static constexpr size_t kMostDots = 16;

private:
    static constexpr size_t kPartColumns = 512;  // whole blocks of every type

    size_t bytes(size_t n_columns) const {
        if (vnni_ == nullptr) return format_->input_bytes(n_columns);
        return ceil_divide(n_columns, VnniKernel::kColumns) * vnni_->piece_bytes;
    }

    const Format* format_;
    const VnniKernel* vnni_;  // null where ggml multiplies
    size_t n_columns_, n_, stride_;
    std::shared_ptr<Scratch> scratch_;
    size_t first_;
};

/// Up to three matrices whose rows follow one another, or one for each of several heads.
class Matrices {
public:
    Matrices(const Call& call, size_t n_heads);

    /// Rows of one head, or of all matrices.
    size_t n_rows() const { return ends_[2]; }

    const uint8_t* row(size_t head, size_t row) const {
        const size_t number = matrix(row);
        const size_t of_matrix = number == 0 ? head * n_rows() + row : row - ends_[number - 1];
        return first_[number] + of_matrix * row_bytes_;
    }

    /// Where the matrix ends that a row is of.
    size_t end(size_t row) const { return ends_[matrix(row)]; }

    /// What the weights of a row are multiplied by.
    float scale(size_t row) const { return scales_[matrix(row)]; }

private:
    size_t matrix(size_t row) const { return row < ends_[0] ? 0 : row < ends_[1] ? 1 : 2; }

    std::array<const uint8_t*, 3> first_{};
    std::array<float, 3> scales_;
    std::array<size_t, 3> ends_;
    size_t row_bytes_;
};

/// The fused RMSNorm of a kernel's input: 1 / sqrt(mean(h^2) + eps), from the partial sums of h^2
/// that the producer of h left behind (Zhang & Sennrich 2019, eq. 4); 1 where there are none.
class Norm {
public:
    Norm(const Call& call, size_t n_vectors);

    float scale(size_t vector) const;

private:
    const float* partials_;
    size_t pitch_, n_;
    float inverse_width_, eps_;
};

}  // namespace vkmoe
