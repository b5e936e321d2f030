// Products of rows of weights and vectors by AVX-512's sums of four products of 8-bit numbers (VNNI).
// ggml's own for single vectors use half as wide registers, and are slower than memory on few cores.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ggml.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__F16C__)
#define VKMOE_HAS_VNNI  // in what is compiled for such a processor
#endif

namespace vkmoe {

class Inputs;
struct Products;

/// How rows of a type are multiplied, with vectors that ggml has rounded and `arrange` put in order.
struct VnniKernel {
    static constexpr size_t kColumns = 256;  // of a piece of an arranged vector

    size_t piece_bytes;

    /// Put a vector [n_columns], rounded by ggml, in order.
    void (*arrange)(const uint8_t* rounded, size_t n_columns, uint8_t* arranged);

    /// Multiply a row by n arranged vectors. The bits of a product depend on its vector alone.
    void (*multiply)(const uint8_t* row, size_t n_columns, const uint8_t* const* vectors, size_t n,
                     float* products);
};

/// The kernel for weights of a type; null where there is none, or the processor has no VNNI.
const VnniKernel* vnni_kernel(ggml_type type);

/// Multiplies rows of weights by inputs arranged for the type's kernel, as `multiply` of products.hpp.
using VnniTile = void(const uint8_t* weights, size_t row_bytes, size_t n_rows, const Inputs& inputs,
                      const uint32_t* vectors, size_t n_vectors, Products& products);

/// Such a function for weights of a type; null where there is none, or the processor has no VNNI.
VnniTile* vnni_tile(ggml_type type);

}  // namespace vkmoe
