#include "command_pool.hpp"

#include <stdexcept>

namespace vkmoe {

namespace {

std::unique_ptr<CommandSlot> make_slot(VkDevice device, uint32_t family) {
    auto slot = std::make_unique<CommandSlot>();
    VkCommandPoolCreateInfo pool_info{};
    pool_info.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
    pool_info.flags = VK_COMMAND_POOL_CREATE_TRANSIENT_BIT;
    pool_info.queueFamilyIndex = family;
    VkCommandPool pool = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateCommandPool, device, &pool_info, nullptr, &pool);
    slot->pool = {"command_pool", pool, [=] { vkDestroyCommandPool(device, pool, nullptr); }};

    VkCommandBufferAllocateInfo buffer_info{};
    buffer_info.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
    buffer_info.commandPool = pool;
    buffer_info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    buffer_info.commandBufferCount = 1;
    VkCommandBuffer buffer = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkAllocateCommandBuffers, device, &buffer_info, &buffer);
    slot->buffer = {"command_buffer", buffer,
                    [=] { vkFreeCommandBuffers(device, pool, 1, &buffer); }};
    return slot;
}

}  // namespace

std::unique_ptr<CommandSlot> CommandPools::acquire(VkDevice device, uint32_t family) {
    std::unique_ptr<CommandSlot> slot;
    {
        const std::lock_guard lock(mutex_);
        if (n_lent_ >= kMaxLive) {
            throw std::runtime_error("too many upload recordings are alive: at most " +
                                     std::to_string(kMaxLive));
        }
        ++n_lent_;
        if (!free_.empty()) {
            slot = std::move(free_.back());
            free_.pop_back();
        }
    }
    try {
        if (slot) {
            VKMOE_CHECKED(vkResetCommandPool, device, slot->pool.get(), 0);
        } else {
            slot = make_slot(device, family);
        }
    } catch (...) {
        const std::lock_guard lock(mutex_);
        --n_lent_;
        throw;
    }
    return slot;
}

void CommandPools::give_back(std::unique_ptr<CommandSlot> slot) noexcept {
    const std::lock_guard lock(mutex_);
    --n_lent_;
    if (!closed_) free_.push_back(std::move(slot));
}

void CommandPools::close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    free_.clear();
}

}  // namespace vkmoe
