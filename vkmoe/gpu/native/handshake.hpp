// How a device and the host take turns within one chain of submits.
#pragma once

#include <chrono>
#include <vector>

#include "context.hpp"
#include "storage.hpp"

namespace vkmoe {

/// Two timeline semaphores: one counts the submits that ended, the other what the host has answered.
/// Of a chain all is queued at once, so that neither waits for a submit in the middle.
/// Methods need the GIL.
class Handshake : public Resource {
  public:
    explicit Handshake(std::shared_ptr<Context> context);
    void release() noexcept override;

    /// How many answers a submit of a chain waits for (0: none), and what it counts up to. Every submit
    /// counts: Mesa joins one that signals nothing with the next, and then both wait for the host
    /// (vk_queue_submits_merge in src/vulkan/runtime/vk_queue.c).
    struct Turn {
        uint64_t answered = 0, ended = 0;
    };

    /// The turns of a chain whose i-th submit `asks` the host, or `waits` for all its answers so far.
    /// Throws std::runtime_error while some of the last chain's are open, std::invalid_argument.
    std::vector<Turn> begin(const std::vector<bool>& waits, const std::vector<bool>& asks);
    /// Takes the last `begin` back: its submits were not queued.
    void cancel() noexcept { last_ = answered_; }

    VkSemaphore ended() const { return held()->ended.get(); }
    VkSemaphore answered() const { return held()->answered.get(); }

    /// Waits until the device asks for the next answer, without the GIL: polls at first. Throws
    /// VulkanError, the Python error of a signal handler, std::runtime_error if nothing is asked or
    /// another thread lets go.
    void wait();
    /// Lets the device go on with what the host was asked for.
    void answer();
    /// Answers all that is open, with whatever lies there: so that what is queued can end.
    void let_go() noexcept;

  private:
    using Clock = std::chrono::steady_clock;

    /// A waiting thread holds this itself: Device::close may run in another one meanwhile.
    struct Held {
        std::shared_ptr<Context> context;
        Owned<VkSemaphore> ended, answered;
    };

    std::shared_ptr<Held> held() const;

    std::shared_ptr<Held> held_;  // null once released
    uint64_t answered_ = 0, last_ = 0;  // turns that were answered; the last that is queued
    uint64_t n_submits_ = 0;            // of all chains
    std::vector<uint64_t> asking_;      // of the last chain: which of all submits ask
};

}  // namespace vkmoe
