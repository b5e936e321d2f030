#include "formats.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <ggml-cpu.h>

namespace vkmoe {

namespace {

std::vector<Format> find_formats() {
    std::vector<Format> found;
    for (int number = 0; number < GGML_TYPE_COUNT; ++number) {
        const auto type = static_cast<ggml_type>(number);
        const ggml_type_traits& common = *ggml_get_type_traits(type);
        const ggml_type_traits_cpu& own = *ggml_get_type_traits_cpu(type);
        if (own.vec_dot == nullptr || common.type_size == 0) continue;
        std::string name = common.type_name;
        std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) {
            return static_cast<char>(std::toupper(letter));
        });
        const ggml_from_float_t from_float = ggml_get_type_traits_cpu(own.vec_dot_type)->from_float;
        found.push_back({std::move(name), type, static_cast<size_t>(common.blck_size),
                         common.type_size, own.vec_dot_type, common.to_float, from_float,
                         vnni_kernel(type)});
    }
    return found;
}

}  // namespace

bool Format::takes(size_t n_columns) const {
    const auto input_weights = static_cast<size_t>(ggml_blck_size(input));
    return n_columns > 0 && n_columns % block_weights == 0 && n_columns % input_weights == 0;
}

size_t Format::input_bytes(size_t n_columns) const {
    return ggml_row_size(input, static_cast<int64_t>(n_columns));
}

void Format::quantise(const float* vector, void* target, size_t n_columns) const {
    if (input == GGML_TYPE_F32) {
        std::memcpy(target, vector, n_columns * sizeof(float));
    } else {
        from_float(vector, target, static_cast<int64_t>(n_columns));
    }
}

float Format::dot(const void* row, const void* vector, size_t n_columns) const {
    float product;
    ggml_get_type_traits_cpu(type)->vec_dot(static_cast<int>(n_columns), &product, 0, row, 0,
                                            vector, 0, 1);
    return product;
}

const std::vector<Format>& formats() {
    static const std::vector<Format> all = find_formats();
    return all;
}

const Format& format_of(int type) {
    for (const Format& format : formats()) {
        if (format.type == type) return format;
    }
    throw std::invalid_argument("ggml multiplies no weights of type " + std::to_string(type));
}

std::string kernel_features() {
    const std::pair<const char*, int (*)()> all[] = {
        {"SSSE3", ggml_cpu_has_ssse3},
        {"AVX", ggml_cpu_has_avx},
        {"AVX2", ggml_cpu_has_avx2},
        {"AVX_VNNI", ggml_cpu_has_avx_vnni},
        {"AVX512", ggml_cpu_has_avx512},
        {"AVX512_VNNI", ggml_cpu_has_avx512_vnni},
        {"AVX512_BF16", ggml_cpu_has_avx512_bf16},
        {"AMX_INT8", ggml_cpu_has_amx_int8},
        {"NEON", ggml_cpu_has_neon},
        {"DOTPROD", ggml_cpu_has_dotprod},
        {"MATMUL_INT8", ggml_cpu_has_matmul_int8},
        {"SVE", ggml_cpu_has_sve},
        {"RISCV_V", ggml_cpu_has_riscv_v},
        {"VSX", ggml_cpu_has_vsx},
    };
    std::string found;
    for (const auto& [name, has] : all) {
        if (has() != 0) found += (found.empty() ? "" : " ") + std::string(name);
    }
    return found;
}

}  // namespace vkmoe
