// How vectors are put in order for the kernels of vnni.cpp and vnni_tiles.cpp.
#pragma once

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include <ggml-common.h>

#include <cstddef>
#include <cstdint>

namespace vkmoe {

/// A type of 256 weights to a block: which 32 columns come first, second ... in registers; columns
/// that share a scale; where the sums of their codes begin, and what those are multiplied by.
struct LargeLayout {
    size_t order[8];
    size_t per_scale, first_sum;
    float offset;
};

constexpr LargeLayout kWithMinima{{0, 2, 1, 3, 4, 6, 5, 7}, 32, 8, 1.0F};  // Q4_K, Q5_K
constexpr LargeLayout kOfQ6K{{0, 1, 2, 3, 4, 5, 6, 7}, 16, 0, 32.0F};
constexpr LargeLayout kOfIq4Xs{{0, 1, 2, 3, 4, 5, 6, 7}, 32, 0, 128.0F};

/// 256 columns of a vector: codes, and the sums of those that share a scale of the weights.
struct alignas(64) LargeInput {
    int8_t codes[QK_K];
    float sums[16];
    float d;
};

}  // namespace vkmoe
