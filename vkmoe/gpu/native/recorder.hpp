// Recording commands, and the finished recording that is submitted again and again.
#pragma once

#include <atomic>
#include <optional>
#include <utility>

#include <kompute/Sequence.hpp>

#include "operations.hpp"

namespace vkmoe {

/// Nanoseconds at which a submit began and ended.
using Interval = std::pair<uint64_t, uint64_t>;

/// A command buffer with all it uses: of a kp::Sequence for the compute queue, of our own
/// resettable slots for uploads.
class Recording : public Resource {
  public:
    Recording(std::shared_ptr<Context> context, const std::string& queue, uint32_t n_timestamps);
    ~Recording() override { release(); }
    void release() noexcept override;

    void record(std::shared_ptr<Operation> operation);
    void end();

    const QueueFacts& queue() const { return queue_; }
    Scope scope() const { return Scope(queue_.has_compute); }
    VkQueryPool queries() const { return queries_; }
    uint32_t n_timestamps() const { return n_timestamps_; }
    /// Throws std::runtime_error once released.
    VkCommandBuffer commands() const;

    /// A command buffer may be in flight only once. Throws std::runtime_error if it is.
    /// Resets the timestamps where that is the host's part.
    void start_flight();
    void end_flight(bool succeeded) noexcept;
    /// The two timestamps of a submit that has finished and whose flight has not been ended yet;
    /// nothing if there are not two, or they cannot be read.
    std::optional<Interval> interval() const noexcept;
    /// Nanoseconds [n_timestamps] of the last submit; throws std::runtime_error before its end.
    std::vector<uint64_t> timestamps() const;

  private:
    VkResult read_ticks(uint64_t* ticks) const;  // [n_timestamps]
    uint64_t nanoseconds(uint64_t tick) const;
    void make_queries();
    void begin_sequence(const std::shared_ptr<BeginOp>& begin);
    void begin_slot(const std::shared_ptr<BeginOp>& begin);

    std::shared_ptr<Context> context_;
    QueueFacts queue_;
    bool is_upload_;
    uint32_t n_timestamps_;
    VkCommandBuffer commands_ = VK_NULL_HANDLE;
    std::atomic<bool> in_flight_{false};
    std::atomic<bool> has_run_{false};
    VkQueryPool queries_ = VK_NULL_HANDLE;
    Owned<VkQueryPool> own_queries_;  // of a sequence; an upload's are those of its slot
    std::vector<std::shared_ptr<Operation>> operations_;  // of an upload; a sequence keeps its own
    std::unique_ptr<CommandSlot> slot_;
    std::shared_ptr<kp::Sequence> sequence_;
};

using Recordings = std::vector<std::shared_ptr<Recording>>;

/// One span to copy.
struct Copy {
    std::shared_ptr<Storage> source;
    uint64_t source_offset;
    std::shared_ptr<Storage> target;
    uint64_t target_offset;
    uint64_t size;

    /// Throws std::invalid_argument unless both ranges are inside and do not overlap.
    void require_sound() const;
};

/// Checks commands and appends them to a recording until finish().
class Recorder {
  public:
    explicit Recorder(std::shared_ptr<Recording> recording) : recording_(std::move(recording)) {}

    void dispatch(std::shared_ptr<Kernel> kernel, std::array<uint32_t, 3> groups,
                  std::string push);
    void barrier();
    /// In one command for those that follow each other between the same two.
    void copy(const std::vector<Copy>& copies);
    void fill(std::shared_ptr<Storage> target, uint64_t offset, uint64_t size, uint32_t word);
    void timestamp(uint32_t index);
    std::shared_ptr<Recording> finish();

  private:
    Recording& recording() const;

    std::shared_ptr<Recording> recording_;  // null once finished
};

}  // namespace vkmoe
