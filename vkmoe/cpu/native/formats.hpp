// How weights of each type are laid out in a file, and ggml's kernels for them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ggml.h>

#include "vnni.hpp"

namespace vkmoe {

/// A type of weights that ggml multiplies as it is.
struct Format {
    std::string name;  // as GGUF names it, in upper case
    ggml_type type;
    size_t block_weights;
    size_t block_bytes;
    ggml_type input;  // that a vector is brought into before it is multiplied
    ggml_to_float_t to_float;      // null for F32
    ggml_from_float_t from_float;  // of the input's type; null for F32
    const VnniKernel* vnni;        // null where ggml multiplies single vectors

    /// Whether rows of so many weights are of whole blocks, and so are inputs.
    bool takes(size_t n_columns) const;

    size_t row_bytes(size_t n_columns) const { return n_columns / block_weights * block_bytes; }

    /// Whether ggml may have kernels for tiles: it has none for types of small blocks.
    bool has_tiles() const { return block_weights == 256; }

    /// Bytes of a vector [n_columns] in the input's type.
    size_t input_bytes(size_t n_columns) const;

    /// Bring a vector [n_columns] into the input's type: `target` has `input_bytes`.
    void quantise(const float* vector, void* target, size_t n_columns) const;

    /// The product of a row of weights and such an input.
    float dot(const void* row, const void* input, size_t n_columns) const;
};

/// All types that ggml multiplies, in order of their numbers.
const std::vector<Format>& formats();

/// The type of a number as in GGUF files; throws std::invalid_argument for others.
const Format& format_of(int type);

/// What the processor has and the kernels were compiled for, such as "AVX2 AVX512".
std::string kernel_features();

}  // namespace vkmoe
