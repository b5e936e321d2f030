// Resettable command buffers for uploads; kp::Sequence cannot be re-recorded.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "ledger.hpp"

namespace vkmoe {

/// One command buffer with a pool of its own, so that recordings need no common lock.
struct CommandSlot {
    Owned<VkCommandPool> pool;
    Owned<VkCommandBuffer> buffer;  // freed before its pool
    Owned<VkQueryPool> queries;     // made for the first recording with timestamps
    uint32_t n_queries = 0;
};

/// Lends command slots and takes them back for the next recording.
class CommandPools {
  public:
    static constexpr size_t kMaxLive = 64;  // drivers keep memory per live command buffer

    /// A slot ready to begin. Throws std::runtime_error when kMaxLive are lent.
    std::unique_ptr<CommandSlot> acquire(VkDevice device, uint32_t family);
    void give_back(std::unique_ptr<CommandSlot> slot) noexcept;
    /// Destroys the free slots; those given back later are destroyed too.
    void close() noexcept;

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<CommandSlot>> free_;
    size_t n_lent_ = 0;
    bool closed_ = false;
};

}  // namespace vkmoe
