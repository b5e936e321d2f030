// The opened device as Python sees it: makes things, submits, and closes in order.
#pragma once

#include "buffer.hpp"
#include "submission.hpp"

namespace vkmoe {

class Device {
  public:
    explicit Device(std::shared_ptr<Context> context);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    std::shared_ptr<Buffer> buffer(uint64_t size, uint32_t memory_type, const std::string& name);
    std::shared_ptr<Tensor> tensor(uint64_t n_words, const std::string& name);
    std::shared_ptr<Kernel> kernel(const std::string& spirv,
                                   std::vector<std::shared_ptr<Tensor>> tensors,
                                   const std::vector<uint32_t>& spec, uint32_t push_bytes,
                                   const std::string& name, uint32_t subgroup_size, bool texts);
    Recorder recorder(uint32_t n_timestamps, const std::string& queue);
    /// Submits recordings, which run in this order, as one.
    std::shared_ptr<Submission> submit(const Recordings& recordings, const std::string& queue);
    /// Records copies and submits them on the upload queue, with nothing begun if it throws.
    /// `timed` where that queue has timestamps.
    std::shared_ptr<Submission> upload(const std::vector<Copy>& copies, bool timed);

    uint32_t n_queues() const { return context().has_upload_queue() ? 2 : 1; }
    bool has_upload_queue() const { return context().has_upload_queue(); }
    bool has_timestamps(const std::string& queue) const {
        return context().has_timestamps(context().queue(queue));
    }
    bool has_common_clock() const { return context().has_common_clock(); }
    /// Bytes allocated here by heap, and the most there ever were; also after close().
    std::vector<uint64_t> memory_bytes() const { return heap_bytes_->now(); }
    std::vector<uint64_t> memory_peak_bytes() const { return heap_bytes_->peak(); }
    bool lost() const { return context().lost(); }
    /// Waits for all submissions now in flight; interruptible, throws like Submission::wait.
    void wait_idle();
    /// Waits at most `timeout_ns` for `only` this submission (null: for all in flight), deaf to
    /// signals. When that runs out the device counts as lost, all that was made here is kept until
    /// close(), and it is false.
    bool settle(uint64_t timeout_ns, const std::shared_ptr<Submission>& only);
    /// Waits at most `timeout_ns`, then releases all that was made here. Does nothing the second
    /// time. Throws VK_TIMEOUT if submissions remain; what was made here is then never released.
    void close(uint64_t timeout_ns);
    /// Waits at most `limit` for submissions now in flight, silently; false if some remain.
    bool join(Submission::Clock::duration limit) noexcept;

  private:
    void pin();
    void abandon();
    Context& context() const;
    template <class Made>
    std::shared_ptr<Made> keep(std::shared_ptr<Made> made);
    void reap();
    void release_all() noexcept;

    std::shared_ptr<Context> context_;  // null once closed
    std::shared_ptr<HeapBytes> heap_bytes_;
    std::vector<std::weak_ptr<Resource>> children_;
    size_t prune_at_ = 64;
    // Guarded by the GIL, as all here: what runs without it copies first what it needs.
    std::vector<std::shared_ptr<Submission>> in_flight_;
    bool closing_ = false;
    size_t n_submitting_ = 0;  // on their way to the queue, without the GIL
    std::vector<std::shared_ptr<Resource>> pinned_;  // the children, once it did not settle
    std::shared_ptr<Tensor> placeholder_;  // bound where a kernel has no tensors
};

/// How long close() and interpreter exit wait for a device.
constexpr std::chrono::nanoseconds kJoinLimit{5'000'000'000};

/// For interpreter exit: no process may end with work in flight.
void join_all_devices() noexcept;

}  // namespace vkmoe
