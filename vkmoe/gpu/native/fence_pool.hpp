// Fences for submits, lent again and again: NVIDIA's driver 580 takes a quarter of a millisecond to
// make one, and as long to destroy it; a submit takes five microseconds.
#pragma once

#include <mutex>
#include <vector>

#include "ledger.hpp"

namespace vkmoe {

/// Lends fences that are not signalled, and takes them back for the next submit.
class FencePool {
  public:
    /// Throws VulkanError.
    Owned<VkFence> acquire(VkDevice device);
    /// Keeps the fence of a submit that has ended; any other is destroyed.
    void give_back(VkDevice device, Owned<VkFence> fence) noexcept;
    /// Destroys the free fences; those given back later are destroyed too.
    void close() noexcept;

  private:
    std::mutex mutex_;
    std::vector<Owned<VkFence>> free_;  // signalled
    bool closed_ = false;
};

}  // namespace vkmoe
