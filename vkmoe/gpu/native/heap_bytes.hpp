// How much device memory is allocated from each heap, now and at most.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include <vulkan/vulkan.h>

namespace vkmoe {

/// The account of one opened device, by bytes as allocated (the buffers' requirement sizes).
/// It outlives the device, so that what is left after closing can be asked for.
class HeapBytes {
  public:
    explicit HeapBytes(const VkPhysicalDeviceMemoryProperties& memory);

    /// After a successful vkAllocateMemory, and with a vkFreeMemory.
    void allocated(uint32_t memory_type, uint64_t n_bytes);
    void freed(uint32_t memory_type, uint64_t n_bytes);

    /// Bytes by heap.
    std::vector<uint64_t> now() const;
    std::vector<uint64_t> peak() const;

  private:
    mutable std::mutex mutex_;  // Kompute's side may run without the GIL
    std::vector<uint32_t> heap_of_type_;
    std::vector<uint64_t> now_;
    std::vector<uint64_t> peak_;
};

}  // namespace vkmoe
