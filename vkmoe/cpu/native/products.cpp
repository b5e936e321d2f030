#include "products.hpp"

#include <algorithm>
#include <array>
#include <memory>

// Of ggml, but not of its interface: what is pinned by the hash of its source.
#include <ggml-cpu-impl.h>
#include <tiled/tiled.h>

namespace vkmoe {

namespace {

constexpr size_t kRoomBytes = 512 << 10;  // what a tile takes of ggml's scratch (tiled-kernel.h)
constexpr size_t kFewestVectors = 8;      // with fewer ggml refuses; 16 cost it the same
constexpr size_t kVectorsAtOnce = 16;     // that a row of weights is multiplied with while it is near

/// Scratch of a thread, aligned as ggml wants it.
struct alignas(64) Room {
    char bytes[kRoomBytes];
};

/// A tensor of `n` rows for ggml, with nothing but what its kernels for tiles look at.
ggml_tensor rows_of(ggml_type type, const void* data, size_t n_columns, size_t stride, size_t n) {
    ggml_tensor tensor{};
    tensor.type = type;
    tensor.data = const_cast<void*>(data);
    const auto columns = static_cast<int64_t>(n_columns), rows = static_cast<int64_t>(n);
    const int64_t shape[] = {columns, rows, 1, 1};
    const size_t strides[] = {ggml_type_size(type), stride, n * stride, n * stride};
    std::copy_n(shape, 4, tensor.ne);
    std::copy_n(strides, 4, tensor.nb);
    return tensor;
}

/// Multiply by ggml's kernels for tiles; false where it has none for this type or processor.
bool multiply_tile(const uint8_t* weights, size_t row_bytes, size_t n_rows, const Inputs& inputs,
                   const uint32_t* vectors, size_t n_vectors, Products& products) {
    const Format& format = inputs.format();
    ggml_tensor matrix = rows_of(format.type, weights, inputs.n_columns(), row_bytes, n_rows);
    // As ggml has the inputs of experts, [n][1][columns]. Each is of a "row" of the batch, and goes
    // to a "slot" of the result, which is [slots][kTileRows] for each row: here the same for all.
    ggml_tensor x =
        rows_of(format.input, inputs.at(0), inputs.n_columns(), inputs.stride(), inputs.size());
    std::swap(x.ne[1], x.ne[2]);
    x.nb[2] = inputs.stride();
    ggml_tensor result = rows_of(GGML_TYPE_F32, products.values, kTileRows,
                                 kTileRows * sizeof(float), kTileVectors);
    result.nb[2] = result.nb[3] = 0;
    result.src[0] = &matrix;
    result.src[1] = &x;
    const size_t n = std::max(n_vectors, kFewestVectors);
    std::array<int32_t, 2 * kTileVectors> slots_and_rows;
    for (size_t i = 0; i < n; ++i) {
        slots_and_rows[2 * i] = static_cast<int32_t>(i);
        slots_and_rows[2 * i + 1] = static_cast<int32_t>(vectors[std::min(i, n_vectors - 1)]);
    }
    ggml_compute_params alone{};
    alone.nth = 1;
    static thread_local const auto room = std::make_unique<Room>();
    return ggml_compute_forward_mul_mat_id_tiled(&alone, &result, 0, static_cast<int64_t>(n),
                                                 slots_and_rows.data(), room->bytes);
}

}  // namespace

Products& first_products() {
    static thread_local const auto products = std::make_unique<Products>();
    return *products;
}

Products& second_products() {
    static thread_local const auto products = std::make_unique<Products>();
    return *products;
}

void multiply(const uint8_t* weights, size_t row_bytes, size_t n_rows, const Inputs& inputs,
              const uint32_t* vectors, size_t n_vectors, Products& products) {
    if (multiply_tile(weights, row_bytes, n_rows, inputs, vectors, n_vectors, products)) return;
    for (size_t first = 0; first < n_vectors; first += kVectorsAtOnce) {
        const size_t end = std::min(first + kVectorsAtOnce, n_vectors);
        for (size_t row = 0; row < n_rows; ++row) {
            for (size_t i = first; i < end; ++i) {
                products.of(i)[row] = inputs.dot(weights + row * row_bytes, vectors[i]);
            }
        }
    }
}

}  // namespace vkmoe
