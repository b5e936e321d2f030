// vkmoe.cpu._probe: what this processor can run, and what each variant of the kernels needs.
//
// Compiled for any processor of the architecture; it runs before a variant is chosen.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "processor.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

// variants.inc, which CMake writes, is ROW(name, constant) for each: the constant of needs.cpp.
#define ROW(name, constant) extern const vkmoe::FeatureBits constant;
#include "variants.inc"
#undef ROW

namespace {

#if defined(__x86_64__)
/// Which registers the system keeps when threads change places; 0 for none but those of SSE.
uint64_t kept_registers() {
    std::array<unsigned, 4> words{};
    __get_cpuid(1, &words[0], &words[1], &words[2], &words[3]);
    if ((words[2] >> 27 & 1) == 0) return 0;  // there is no XGETBV
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}

/// Registers EAX, EBX, ECX, EDX; zeros where the processor has no such leaf.
std::array<unsigned, 4> cpuid(unsigned leaf, unsigned subleaf) {
    std::array<unsigned, 4> words{};
    if (subleaf > 0) {
        __get_cpuid_count(leaf, 0, &words[0], &words[1], &words[2], &words[3]);
        const bool is_there = words[0] >= subleaf;
        words = {};
        if (!is_there) return words;
    }
    __get_cpuid_count(leaf, subleaf, &words[0], &words[1], &words[2], &words[3]);
    return words;
}

bool has(unsigned leaf, unsigned subleaf, size_t word, unsigned bit, uint64_t registers) {
    const bool are_kept = (kept_registers() & registers) == registers;
    return are_kept && (cpuid(leaf, subleaf)[word] >> bit & 1) != 0;
}
#elif defined(__aarch64__)
bool has(unsigned word, unsigned bit) {
    return (getauxval(word == 0 ? AT_HWCAP : AT_HWCAP2) >> bit & 1) != 0;
}
#endif

std::vector<std::string> names_of(vkmoe::FeatureBits bits) {
    std::vector<std::string> names;
#define ROW(name, ...)                         \
    if ((bits & 1) != 0) names.push_back(name); \
    bits >>= 1;
    VKMOE_FEATURES(ROW)
#undef ROW
    return names;
}

std::vector<std::string> features() {
    std::vector<std::string> names;
#define ROW(name, macro, ...) \
    if (has(__VA_ARGS__)) names.push_back(name);
    VKMOE_FEATURES(ROW)
#undef ROW
    return names;
}

std::vector<std::pair<std::string, std::vector<std::string>>> variants() {
    return {
#define ROW(name, constant) {name, names_of(constant)},
#include "variants.inc"
#undef ROW
    };
}

}  // namespace

PYBIND11_MODULE(_probe, module) {
    module.def("features", &features);
    module.def("variants", &variants);
}
