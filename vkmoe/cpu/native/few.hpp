// Products of rows of weights with few vectors of a prompt, for which ggml's tiles are too wide.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inputs.hpp"
#include "products.hpp"

namespace vkmoe {

constexpr size_t kFewVectors = 12;

/// With how many vectors, at most, this takes less time than a tile, by the type of weights.
size_t few_vectors(const Format& format);

/// How often a block's product is rounded when it is multiplied by the vector's scale and added: that
/// is the choice of the compiler that built ggml's tiles.
enum class Rounding { kUnknown, kOnce, kTwice };

/// Multiply as ggml's tiles do, to the bit if the rounding is theirs, up to kFewVectors; false for
/// types and processors that this is not written for.
bool multiply_few(Rounding rounding, const uint8_t* weights, size_t row_bytes, size_t n_rows,
                  const Inputs& inputs, const uint32_t* vectors, size_t n_vectors,
                  Products& products);

}  // namespace vkmoe
