#include "call.hpp"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace vkmoe {

void Regions::add(uint64_t address, size_t n_bytes) { sizes_[address] = n_bytes; }

void Regions::remove(uint64_t address) {
    const auto found = sizes_.find(address);
    if (found == sizes_.end()) return;
    scales_.erase(scales_.lower_bound(address), scales_.lower_bound(address + found->second));
    sizes_.erase(found);
}

float Regions::scale(uint64_t address) const {
    const auto found = scales_.find(address);
    return found == scales_.end() ? 1.0F : found->second;
}

bool Regions::hold(uint64_t address, size_t n_bytes) const {
    auto behind = sizes_.upper_bound(address);
    if (behind == sizes_.begin()) return false;
    const auto& [first, size] = *--behind;
    return address - first <= size && n_bytes <= size - (address - first);
}

size_t Scratch::take(size_t n_bytes) {
    const size_t taken = used_;
    used_ = (taken + n_bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (used_ + kAlignment > bytes_.size()) bytes_.resize(used_ + kAlignment);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    first_ = (address + kAlignment - 1) / kAlignment * kAlignment - address;
    return taken;
}

size_t Call::count(const std::string& name) const {
    const auto found = numbers.find(name);
    if (found == numbers.end() || !std::holds_alternative<uint64_t>(found->second)) {
        throw std::invalid_argument(variant + " has no count " + name);
    }
    return static_cast<size_t>(std::get<uint64_t>(found->second));
}

float Call::real(const std::string& name) const {
    const auto found = numbers.find(name);
    if (found == numbers.end() || !std::holds_alternative<double>(found->second)) {
        throw std::invalid_argument(variant + " has no number " + name);
    }
    return static_cast<float>(std::get<double>(found->second));
}

const Words& Call::tensor(const std::string& name) const {
    const auto found = tensors.find(name);
    if (found == tensors.end()) throw std::invalid_argument(variant + " has no tensor " + name);
    return found->second;
}

void* Call::words_of(const std::string& name, size_t n_words) const {
    const Words& found = tensor(name);
    if (found.n_words < n_words) {
        throw std::invalid_argument(variant + " needs " + std::to_string(n_words) + " words of " +
                                    name + ", which has " + std::to_string(found.n_words));
    }
    return found.data;
}

const uint8_t* Call::bytes(const std::string& name, size_t n_bytes, size_t offset) const {
    const uint64_t address = count(name);
    if (address == 0) return nullptr;
    if (!regions->hold(address, offset) || !regions->hold(address + offset, n_bytes)) {
        throw std::invalid_argument(variant + ": " + name + " leads out of all memory");
    }
    return reinterpret_cast<const uint8_t*>(address) + offset;
}

const Format& Call::format() const {
    std::string name = variant.substr(variant.find('.') + 1);  // behind a plus: how it is mapped
    name.erase(std::min(name.find('+'), name.size()));
    for (char& letter : name) {
        letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    }
    for (const Format& format : formats()) {
        if (format.name == name) return format;
    }
    throw std::invalid_argument(variant + " names no type of weights");
}

}  // namespace vkmoe
