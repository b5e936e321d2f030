// Products of rows of weights with many vectors at once, for prompts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inputs.hpp"

namespace vkmoe {

constexpr size_t kTileRows = 64;       // rows of weights that are multiplied at once, at most
constexpr size_t kTileVectors = 256;   // and vectors

/// Products of a tile, [n_vectors][kTileRows], of which the first so many of a vector are in use.
struct Products {
    float values[kTileVectors * kTileRows];

    float* of(size_t vector) { return values + vector * kTileRows; }
};

/// Two of them for each thread, which live as long as it does: gate and up.
Products& first_products();
Products& second_products();

/// Multiply rows of weights, `row_bytes` apart, by the inputs of these numbers.
///
/// The bits of a product depend on its row and its vector alone: neither on what else is in the
/// tile nor on how many vectors there are. They are not those of `Inputs::dot`.
void multiply(const uint8_t* weights, size_t row_bytes, size_t n_rows, const Inputs& inputs,
              const uint32_t* vectors, size_t n_vectors, Products& products);

}  // namespace vkmoe
