#include "buffer.hpp"

#include <stdexcept>

namespace vkmoe {

void Storage::require_range(uint64_t offset, uint64_t size) const {
    if (size > 0 && offset <= n_bytes() && size <= n_bytes() - offset) return;
    throw std::invalid_argument("bytes [" + std::to_string(offset) + ", +" + std::to_string(size) +
                                ") are not inside \"" + name() + "\" of " +
                                std::to_string(n_bytes()) + " bytes");
}

Memory::Memory(std::shared_ptr<Context> context, VkMemoryRequirements requirements,
               uint32_t memory_type)
    : context_(std::move(context)), n_bytes_(requirements.size) {
    const VkDevice device = context_->device();
    VkMemoryAllocateFlagsInfo flags{};
    flags.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO;
    flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
    VkMemoryAllocateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    info.pNext = context_->has_addresses() ? &flags : nullptr;
    info.allocationSize = n_bytes_;
    info.memoryTypeIndex = memory_type;
    VkDeviceMemory memory = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkAllocateMemory, device, &info, nullptr, &memory);
    const auto heaps = context_->heap_bytes();
    memory_ = {"memory", memory, [=, n_bytes = n_bytes_] {
                   vkFreeMemory(device, memory, nullptr);
                   heaps->freed(memory_type, n_bytes);
               }};
    heaps->allocated(memory_type, n_bytes_);

    const auto properties = context_->memory().memoryTypes[memory_type].propertyFlags;
    coherent_ = (properties & VK_MEMORY_PROPERTY_HOST_COHERENT_BIT) != 0;
    if ((properties & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT) == 0) return;
    VKMOE_CHECKED(vkMapMemory, device, memory, VkDeviceSize{0}, VkDeviceSize{VK_WHOLE_SIZE}, 0u,
                  &mapped_);
}

VkMappedMemoryRange Memory::range(uint64_t offset, uint64_t size) const {
    const uint64_t atom = context_->properties().limits.nonCoherentAtomSize;
    const uint64_t begin = offset / atom * atom;
    const uint64_t end = (offset + size + atom - 1) / atom * atom;
    VkMappedMemoryRange range{};
    range.sType = VK_STRUCTURE_TYPE_MAPPED_MEMORY_RANGE;
    range.memory = handle();
    range.offset = begin;
    range.size = end >= n_bytes_ ? VK_WHOLE_SIZE : end - begin;
    return range;
}

void Memory::flush(uint64_t offset, uint64_t size) const {
    if (coherent_) return;
    const auto bytes = range(offset, size);
    VKMOE_CHECKED(vkFlushMappedMemoryRanges, context_->device(), 1u, &bytes);
}

void Memory::invalidate(uint64_t offset, uint64_t size) const {
    if (coherent_) return;
    const auto bytes = range(offset, size);
    VKMOE_CHECKED(vkInvalidateMappedMemoryRanges, context_->device(), 1u, &bytes);
}

Buffer::Buffer(std::shared_ptr<Context> context, uint64_t size, uint32_t memory_type,
               std::string name)
    : context_(std::move(context)),
      n_bytes_(size),
      memory_type_(memory_type),
      name_(std::move(name)) {
    if (size == 0) throw std::invalid_argument("buffer \"" + name_ + "\" has no bytes");
    if (memory_type >= context_->memory().memoryTypeCount) {
        throw std::invalid_argument("there is no memory type " + std::to_string(memory_type));
    }
    const VkDevice device = context_->device();
    VkBufferCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    info.size = size;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT;
    if (context_->has_addresses()) info.usage |= VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
    context_->share(info);
    VkBuffer buffer = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateBuffer, device, &info, nullptr, &buffer);
    buffer_ = {"buffer", buffer, [=] { vkDestroyBuffer(device, buffer, nullptr); }};
    context_->instance().name_object(device, VK_OBJECT_TYPE_BUFFER,
                                     reinterpret_cast<uint64_t>(buffer), name_);

    VkMemoryRequirements requirements;
    vkGetBufferMemoryRequirements(device, buffer, &requirements);
    // Some drivers list types that hold no buffers; the injection stands in for one of those.
    if (injected("vkGetBufferMemoryRequirements")) requirements.memoryTypeBits = 0;
    if ((requirements.memoryTypeBits >> memory_type & 1u) == 0) {
        throw VulkanError(VK_ERROR_FEATURE_NOT_PRESENT, "vkGetBufferMemoryRequirements",
                          "memory type " + std::to_string(memory_type) + " cannot hold a buffer");
    }
    memory_ = std::make_shared<Memory>(context_, requirements, memory_type);
    VKMOE_CHECKED(vkBindBufferMemory, device, buffer, memory_->handle(), VkDeviceSize{0});
    if (!context_->has_addresses()) return;
    VkBufferDeviceAddressInfo address_info{};
    address_info.sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO;
    address_info.buffer = buffer;
    address_ = vkGetBufferDeviceAddress(device, &address_info);
}

VkBuffer Buffer::handle() const {
    if (!buffer_) throw std::runtime_error("buffer \"" + name_ + "\" is closed");
    return buffer_.get();
}

const std::shared_ptr<Memory>& Buffer::memory() const {
    if (!is_mapped()) throw std::runtime_error("buffer \"" + name_ + "\" is not mapped");
    return memory_;
}

void Buffer::release() noexcept {
    buffer_.reset();
    memory_.reset();
    context_.reset();
}

}  // namespace vkmoe
