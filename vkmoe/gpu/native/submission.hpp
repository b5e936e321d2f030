// One submit of recordings: its fence, and waiting for it without holding the GIL.
#pragma once

#include <chrono>

#include "recorder.hpp"

namespace vkmoe {

class Submission : public Resource {
  public:
    using Clock = std::chrono::steady_clock;

    /// Borrows a fence. The submit itself is Device's.
    Submission(std::shared_ptr<Context> context, Recordings recordings);
    void release() noexcept override;
    /// Marks the recordings as in flight; throws std::runtime_error if one is, and marks none.
    void start_flights();

    VkFence fence() const { return fence_->handle.get(); }
    /// Marks the flight as begun (after vkQueueSubmit succeeded).
    void started() { submitted_at_ = Clock::now(); }

    /// Needs the GIL, and releases it while it waits. False if timeout_ns (0: none) ran out.
    /// Throws VulkanError if the device is lost, the Python error of a signal handler.
    bool wait(uint64_t expected_ns, uint64_t timeout_ns);
    /// When its first recording began and its last ended on the device's clock; nothing if these
    /// have not two timestamps each. Throws std::runtime_error before its end has been seen.
    std::optional<Interval> interval();
    /// Asks the fence, without waiting.
    bool done();
    /// Waits at most `limit` for the driver alone: no injections, no signals, no exceptions.
    /// Needs the GIL, and releases it while it waits.
    bool join(Clock::duration limit) noexcept;

  private:
    /// A waiting thread holds this itself: Device::close may run in another one meanwhile.
    struct Fence {
        explicit Fence(std::shared_ptr<Context> device_context);
        ~Fence();  // back to the pool
        Fence(const Fence&) = delete;
        Fence& operator=(const Fence&) = delete;

        std::shared_ptr<Context> context;
        Owned<VkFence> handle;
    };

    std::shared_ptr<Fence> held_fence() const;
    bool ask(const Fence& fence);
    bool wait_slice(const Fence& fence, std::chrono::nanoseconds limit);
    bool settle(const Fence& fence, const char* call, VkResult result);
    bool poll(const Fence& fence, Clock::time_point sleep_until, Clock::time_point give_up);
    void finish(bool succeeded) noexcept;

    std::mutex mutex_;  // guards the two below when several threads wait
    Recordings recordings_;  // empty once finished
    std::optional<Interval> interval_;
    std::atomic<bool> finished_{false};
    Clock::time_point submitted_at_;
    std::shared_ptr<Fence> fence_;  // null once released
};

}  // namespace vkmoe
