// What a dispatch of a program says to the kernel that carries it out: numbers and tensors by name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "formats.hpp"

namespace vkmoe {

/// Memory that addresses may lead to: buffers and mapped files.
class Regions {
public:
    void add(uint64_t address, size_t n_bytes);
    void remove(uint64_t address);

    /// Have the weights of the matrix there multiplied by a scale.
    void set_scale(uint64_t address, float scale) { scales_[address] = scale; }

    /// What the weights of the matrix there are multiplied by: 1 where nothing was said.
    float scale(uint64_t address) const;

    /// Whether all of these bytes are of one region.
    bool hold(uint64_t address, size_t n_bytes) const;

private:
    std::map<uint64_t, size_t> sizes_;  // by address
    std::map<uint64_t, float> scales_;
};

/// Room that dispatches need while they run. All programs of a device share it: one runs at a time,
/// and none while another is recorded.
class Scratch {
public:
    /// Begin anew: what has room now is done before the dispatches to come begin.
    void reuse() { used_ = 0; }

    /// Room for so many bytes, at a distance from `data` that is a multiple of kAlignment.
    size_t take(size_t n_bytes);

    /// Where all room begins; it moves as long as programs are recorded.
    uint8_t* data() { return bytes_.data() + first_; }

private:
    static constexpr size_t kAlignment = 64;

    std::vector<uint8_t> bytes_;
    size_t first_ = 0, used_ = 0;
};

/// 32-bit words that a kernel is bound to.
struct Words {
    void* data;
    size_t n_words;
};

/// A dispatch, checked as its kernel asks for what it names: std::invalid_argument where it does not
/// fit. What was checked when a program is recorded needs no look while it runs.
class Call {
public:
    using Number = std::variant<uint64_t, double>;

    std::string variant;  // the kernel's name and, behind a point, the type of its weights
    std::map<std::string, Number> numbers;
    std::map<std::string, Words> tensors;
    std::array<size_t, 3> groups;
    const Regions* regions;
    std::shared_ptr<Scratch> scratch;

    size_t count(const std::string& name) const;
    float real(const std::string& name) const;

    /// So many words of a tensor from its beginning.
    template <class Word>
    Word* words(const std::string& name, size_t n_words) const {
        static_assert(sizeof(Word) == 4, "tensors are of 32-bit words");
        return static_cast<Word*>(words_of(name, n_words));
    }

    /// How many words a tensor has.
    size_t n_words(const std::string& name) const { return tensor(name).n_words; }

    /// So many bytes at the address of that name, plus an offset; null where the address is 0.
    const uint8_t* bytes(const std::string& name, size_t n_bytes, size_t offset = 0) const;

    /// What the weights of the matrix at the address of that name are multiplied by.
    float scale(const std::string& name) const { return regions->scale(count(name)); }

    /// The type of the weights that the variant names.
    const Format& format() const;

private:
    const Words& tensor(const std::string& name) const;
    void* words_of(const std::string& name, size_t n_words) const;
};

}  // namespace vkmoe
