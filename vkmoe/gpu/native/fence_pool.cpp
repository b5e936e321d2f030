#include "fence_pool.hpp"

namespace vkmoe {

namespace {

Owned<VkFence> make_fence(VkDevice device) {
    VkFenceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO;
    VkFence fence = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateFence, device, &info, nullptr, &fence);
    return {"fence", fence, [=] { vkDestroyFence(device, fence, nullptr); }};
}

}  // namespace

Owned<VkFence> FencePool::acquire(VkDevice device) {
    Owned<VkFence> fence;
    {
        const std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            fence = std::move(free_.back());
            free_.pop_back();
        }
    }
    if (!fence) return make_fence(device);
    const VkFence handle = fence.get();
    VKMOE_CHECKED(vkResetFences, device, 1u, &handle);
    return fence;
}

void FencePool::give_back(VkDevice device, Owned<VkFence> fence) noexcept {
    if (vkGetFenceStatus(device, fence.get()) != VK_SUCCESS) return;
    const std::lock_guard lock(mutex_);
    if (!closed_) free_.push_back(std::move(fence));
}

void FencePool::close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    free_.clear();
}

}  // namespace vkmoe
