#include "products.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

// Of ggml, but not of its interface: what is pinned by the hash of its source.
#include <ggml-cpu-impl.h>
#include <tiled/tiled.h>

#include "few.hpp"

namespace vkmoe {

namespace {

constexpr size_t kRoomBytes = 512 << 10;  // what a tile takes of ggml's scratch (tiled-kernel.h)
constexpr size_t kFewestVectors = 8;      // with fewer ggml refuses; 16 cost it the same

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
    if (format.vnni != nullptr || !format.has_tiles()) return false;
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

/// By which rounding `multiply_few` gives the bits of tiles, for weights of a type; found by trial.
Rounding find_rounding(const Format& format) {
    constexpr size_t kColumns = 512;
    uint32_t drawn = 1;
    const auto draw = [&] {  // from -1 to 1 (Numerical Recipes, 7.1)
        drawn = drawn * 1664525U + 1013904223U;
        return static_cast<float>(static_cast<int32_t>(drawn)) * 0x1p-31F;
    };
    std::array<float, kColumns> values;
    const size_t row_bytes = format.row_bytes(kColumns);
    std::vector<uint8_t> weights(kTileRows * row_bytes);
    Call call;
    call.scratch = std::make_shared<Scratch>();
    const Inputs inputs(call, format, kColumns, kFewVectors);
    std::array<uint32_t, kFewVectors> vectors{};
    const auto few = std::make_unique<Products>(), tile = std::make_unique<Products>();
    if (!multiply_few(Rounding::kOnce, nullptr, 0, 0, inputs, vectors.data(), 0, *few)) {
        return Rounding::kUnknown;
    }
    const auto quantise = ggml_get_type_traits(format.type)->from_float_ref;
    for (size_t row = 0; row < kTileRows; ++row) {
        std::generate(values.begin(), values.end(), draw);
        quantise(values.data(), weights.data() + row * row_bytes, kColumns);
    }
    for (size_t i = 0; i < kFewVectors; ++i) {
        std::generate(values.begin(), values.end(), draw);
        inputs.take(i, values.data());
        vectors[i] = static_cast<uint32_t>(i);
    }
    if (!multiply_tile(weights.data(), row_bytes, kTileRows, inputs, vectors.data(), kFewVectors,
                       *tile)) {
        return Rounding::kUnknown;
    }
    for (const Rounding rounding : {Rounding::kOnce, Rounding::kTwice}) {
        multiply_few(rounding, weights.data(), row_bytes, kTileRows, inputs, vectors.data(),
                     kFewVectors, *few);
        const size_t n_bytes = kFewVectors * kTileRows * sizeof(float);
        if (std::memcmp(few->values, tile->values, n_bytes) == 0) return rounding;
    }
    return Rounding::kUnknown;
}

Rounding rounding_of_tiles(const Format& format) {
    static const std::vector<Rounding> known = [] {
        std::vector<Rounding> found(GGML_TYPE_COUNT, Rounding::kUnknown);
        for (const Format& each : formats()) {
            if (each.vnni == nullptr) found[each.type] = find_rounding(each);
        }
        return found;
    }();
    return known[format.type];
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
    if (VnniTile* const tile = vnni_tile(inputs.format().type)) {
        return tile(weights, row_bytes, n_rows, inputs, vectors, n_vectors, products);
    }
    if (n_vectors <= few_vectors(inputs.format())) {
        const Rounding rounding = rounding_of_tiles(inputs.format());
        if (rounding != Rounding::kUnknown) {
            multiply_few(rounding, weights, row_bytes, n_rows, inputs, vectors, n_vectors,
                         products);
            return;
        }
    }
    if (multiply_tile(weights, row_bytes, n_rows, inputs, vectors, n_vectors, products)) return;
    for (size_t first = 0; first < n_vectors; first += Inputs::kMostDots) {
        const size_t n = std::min(Inputs::kMostDots, n_vectors - first);
        for (size_t row = 0; row < n_rows; ++row) {  // near, while it is multiplied
            std::array<float, Inputs::kMostDots> found;
            inputs.dots(weights + row * row_bytes, vectors + first, n, found.data());
            for (size_t i = 0; i < n; ++i) products.of(first + i)[row] = found[i];
        }
    }
}

}  // namespace vkmoe
