#include "heap_bytes.hpp"

#include <algorithm>

namespace vkmoe {

HeapBytes::HeapBytes(const VkPhysicalDeviceMemoryProperties& memory)
    : now_(memory.memoryHeapCount), peak_(memory.memoryHeapCount) {
    for (uint32_t i = 0; i < memory.memoryTypeCount; ++i) {
        heap_of_type_.push_back(memory.memoryTypes[i].heapIndex);
    }
}

void HeapBytes::allocated(uint32_t memory_type, uint64_t n_bytes) {
    const std::lock_guard lock(mutex_);
    const uint32_t heap = heap_of_type_[memory_type];
    now_[heap] += n_bytes;
    peak_[heap] = std::max(peak_[heap], now_[heap]);
}

void HeapBytes::freed(uint32_t memory_type, uint64_t n_bytes) {
    const std::lock_guard lock(mutex_);
    now_[heap_of_type_[memory_type]] -= n_bytes;
}

std::vector<uint64_t> HeapBytes::now() const {
    const std::lock_guard lock(mutex_);
    return now_;
}

std::vector<uint64_t> HeapBytes::peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
}

}  // namespace vkmoe
