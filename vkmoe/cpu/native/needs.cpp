// What a variant was compiled for: this file is compiled as its kernels are, and holds a constant
// alone, so that nothing of it is ever run.
#include "processor.hpp"

// An undefined macro is its own name, and those begin with an underscore.
#define TEXT_OF(tokens) #tokens
#define TEXT(macro) TEXT_OF(macro)

namespace {

constexpr bool kIsCompiled[] = {
#define ROW(name, macro, ...) TEXT(macro)[0] != '_',
    VKMOE_FEATURES(ROW)
#undef ROW
    false};

constexpr vkmoe::FeatureBits bits() {
    vkmoe::FeatureBits found = 0, bit = 1;
    for (const bool is_compiled : kIsCompiled) {
        if (is_compiled) found |= bit;
        bit <<= 1;
    }
    return found;
}

}  // namespace

extern const vkmoe::FeatureBits VKMOE_NEEDS;
constexpr vkmoe::FeatureBits VKMOE_NEEDS = bits();
