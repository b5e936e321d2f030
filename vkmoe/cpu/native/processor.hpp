// What a processor may have that compilers make use of without being asked.
//
// VKMOE_FEATURES(ROW) gives ROW(name, macro, ...): the macro is defined where a file is compiled
// for the feature, the rest is where the processor shows it. Those of variants come first.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
// The leaf and subleaf of CPUID, its register (EAX is 0) and bit, and the registers that the system
// must keep (XCR0): 0x6 those of AVX, 0xE6 those of AVX-512, 0x80000 those of APX.
#define VKMOE_FEATURES(ROW)                                          \
    ROW("AVX2", __AVX2__, 7, 0, 1, 5, 0x6)                           \
    ROW("FMA", __FMA__, 1, 0, 2, 12, 0x6)                            \
    ROW("F16C", __F16C__, 1, 0, 2, 29, 0x6)                          \
    ROW("BMI2", __BMI2__, 7, 0, 1, 8, 0)                             \
    ROW("AVX_VNNI", __AVXVNNI__, 7, 1, 0, 4, 0x6)                    \
    ROW("AVX512F", __AVX512F__, 7, 0, 1, 16, 0xE6)                   \
    ROW("AVX512CD", __AVX512CD__, 7, 0, 1, 28, 0xE6)                 \
    ROW("AVX512BW", __AVX512BW__, 7, 0, 1, 30, 0xE6)                 \
    ROW("AVX512DQ", __AVX512DQ__, 7, 0, 1, 17, 0xE6)                 \
    ROW("AVX512VL", __AVX512VL__, 7, 0, 1, 31, 0xE6)                 \
    ROW("AVX512_VBMI", __AVX512VBMI__, 7, 0, 2, 1, 0xE6)             \
    ROW("AVX512_VNNI", __AVX512VNNI__, 7, 0, 2, 11, 0xE6)            \
    ROW("AVX512_BF16", __AVX512BF16__, 7, 1, 0, 5, 0xE6)             \
    ROW("AVX512_FP16", __AVX512FP16__, 7, 0, 3, 23, 0xE6)            \
    ROW("AVX512_IFMA", __AVX512IFMA__, 7, 0, 1, 21, 0xE6)            \
    ROW("AVX512_VBMI2", __AVX512VBMI2__, 7, 0, 2, 6, 0xE6)           \
    ROW("AVX512_BITALG", __AVX512BITALG__, 7, 0, 2, 12, 0xE6)        \
    ROW("AVX512_VPOPCNTDQ", __AVX512VPOPCNTDQ__, 7, 0, 2, 14, 0xE6)  \
    ROW("AVX_IFMA", __AVXIFMA__, 7, 1, 0, 23, 0x6)                   \
    ROW("AVX_VNNI_INT8", __AVXVNNIINT8__, 7, 1, 3, 4, 0x6)           \
    ROW("AVX_VNNI_INT16", __AVXVNNIINT16__, 7, 1, 3, 10, 0x6)        \
    ROW("AVX_NE_CONVERT", __AVXNECONVERT__, 7, 1, 3, 5, 0x6)         \
    ROW("GFNI", __GFNI__, 7, 0, 2, 8, 0)                             \
    ROW("APX", __APX_F__, 7, 1, 3, 21, 0x80000)                      \
    ROW("AVX", __AVX__, 1, 0, 2, 28, 0x6)                            \
    ROW("SSE3", __SSE3__, 1, 0, 2, 0, 0)                             \
    ROW("SSSE3", __SSSE3__, 1, 0, 2, 9, 0)                           \
    ROW("SSE4_1", __SSE4_1__, 1, 0, 2, 19, 0)                        \
    ROW("SSE4_2", __SSE4_2__, 1, 0, 2, 20, 0)                        \
    ROW("MOVBE", __MOVBE__, 1, 0, 2, 22, 0)                          \
    ROW("POPCNT", __POPCNT__, 1, 0, 2, 23, 0)                        \
    ROW("BMI", __BMI__, 7, 0, 1, 3, 0)                               \
    ROW("LAHF", __LAHF_SAHF__, 0x80000001, 0, 2, 0, 0)               \
    ROW("LZCNT", __LZCNT__, 0x80000001, 0, 2, 5, 0)                  \
    ROW("SSE4A", __SSE4A__, 0x80000001, 0, 2, 6, 0)                  \
    ROW("XOP", __XOP__, 0x80000001, 0, 2, 11, 0x6)                   \
    ROW("FMA4", __FMA4__, 0x80000001, 0, 2, 16, 0x6)                 \
    ROW("TBM", __TBM__, 0x80000001, 0, 2, 21, 0)
#elif defined(__aarch64__)
// The word of what Linux says of a processor (AT_HWCAP, AT_HWCAP2), and its bit.
#define VKMOE_FEATURES(ROW)                                  \
    ROW("DOTPROD", __ARM_FEATURE_DOTPROD, 0, 20)             \
    ROW("FP16", __ARM_FEATURE_FP16_VECTOR_ARITHMETIC, 0, 10) \
    ROW("I8MM", __ARM_FEATURE_MATMUL_INT8, 1, 13)            \
    ROW("SVE", __ARM_FEATURE_SVE, 0, 22)                     \
    ROW("SVE2", __ARM_FEATURE_SVE2, 1, 1)                    \
    ROW("SME", __ARM_FEATURE_SME, 1, 23)                     \
    ROW("BF16", __ARM_FEATURE_BF16, 1, 14)                   \
    ROW("LSE", __ARM_FEATURE_ATOMICS, 0, 8)                  \
    ROW("CRC32", __ARM_FEATURE_CRC32, 0, 7)                  \
    ROW("RDM", __ARM_FEATURE_QRDMX, 0, 12)                   \
    ROW("JSCVT", __ARM_FEATURE_JCVT, 0, 13)                  \
    ROW("FCMA", __ARM_FEATURE_COMPLEX, 0, 14)                \
    ROW("LRCPC", __ARM_FEATURE_RCPC, 0, 15)                  \
    ROW("FHM", __ARM_FEATURE_FP16_FML, 0, 23)
#else
#define VKMOE_FEATURES(ROW)
#endif

namespace vkmoe {

/// A set of features: bit i is that of row i.
using FeatureBits = uint64_t;

}  // namespace vkmoe
