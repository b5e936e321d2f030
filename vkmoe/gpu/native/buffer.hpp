// A raw buffer with memory of its own, a device address and, where visible, a mapping.
#pragma once

#include <memory>

#include "context.hpp"
#include "storage.hpp"

namespace vkmoe {

/// Device memory of one buffer, mapped for as long as it lives if it is host visible.
/// numpy views hold it (not the buffer), so it may outlive Device::close.
class Memory {
  public:
    Memory(std::shared_ptr<Context> context, VkMemoryRequirements requirements,
           uint32_t memory_type);

    VkDeviceMemory handle() const { return memory_.get(); }
    void* mapped() const { return mapped_; }
    /// No-ops on coherent memory; the range is widened to whole non-coherent atoms.
    void flush(uint64_t offset, uint64_t size) const;
    void invalidate(uint64_t offset, uint64_t size) const;

  private:
    VkMappedMemoryRange range(uint64_t offset, uint64_t size) const;

    std::shared_ptr<Context> context_;
    uint64_t n_bytes_;
    bool coherent_ = true;
    void* mapped_ = nullptr;
    Owned<VkDeviceMemory> memory_;  // freeing it unmaps it
};

class Buffer : public Storage {
  public:
    Buffer(std::shared_ptr<Context> context, uint64_t size, uint32_t memory_type,
           std::string name);

    VkBuffer handle() const override;
    uint64_t n_bytes() const override { return n_bytes_; }
    const std::string& name() const override { return name_; }
    void release() noexcept override;

    /// The device address; 0 if the device was opened without buffer_device_address.
    uint64_t address() const { return address_; }
    uint32_t memory_type() const { return memory_type_; }
    bool is_mapped() const { return memory_ && memory_->mapped() != nullptr; }
    const std::shared_ptr<Memory>& memory() const;

  private:
    std::shared_ptr<Context> context_;
    uint64_t n_bytes_;
    uint32_t memory_type_;
    std::string name_;
    uint64_t address_ = 0;
    std::shared_ptr<Memory> memory_;
    Owned<VkBuffer> buffer_;  // destroyed before its memory
};

}  // namespace vkmoe
