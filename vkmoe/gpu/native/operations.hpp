// One kp::OpBase for each kind of command. Each keeps what it uses alive.
#pragma once

#include <kompute/operations/OpBase.hpp>

#include "kernel.hpp"

namespace vkmoe {

/// Stages and accesses of the commands we record, which depend on the queue.
struct Scope {
    VkPipelineStageFlags stages;
    VkAccessFlags access;

    /// No COMPUTE stage on a queue that has none: validation rejects it.
    explicit Scope(bool has_compute);
};

/// Our operations only record: submission is not Kompute's.
class Operation : public kp::OpBase {
  public:
    void preEval(const vk::CommandBuffer&) override {}
    void postEval(const vk::CommandBuffer&) override {}
};

/// Resets the timestamps and makes all earlier work and host writes visible.
class BeginOp : public Operation {
  public:
    BeginOp(Scope scope, VkQueryPool queries, uint32_t n_queries)
        : scope_(scope), queries_(queries), n_queries_(n_queries) {}
    void record(const vk::CommandBuffer& commands) override;
    /// The command buffer of the sequence, which Kompute does not give away otherwise.
    VkCommandBuffer commands() const { return commands_; }

  private:
    Scope scope_;
    VkQueryPool queries_;
    uint32_t n_queries_;
    VkCommandBuffer commands_ = VK_NULL_HANDLE;
};

class BarrierOp : public Operation {
  public:
    explicit BarrierOp(Scope scope) : scope_(scope) {}
    void record(const vk::CommandBuffer& commands) override;

  private:
    Scope scope_;
};

/// Makes all writes of the recording visible to the host.
class EndOp : public Operation {
  public:
    explicit EndOp(Scope scope) : scope_(scope) {}
    void record(const vk::CommandBuffer& commands) override;

  private:
    Scope scope_;
};

class DispatchOp : public Operation {
  public:
    DispatchOp(std::shared_ptr<Kernel> kernel, std::array<uint32_t, 3> groups, std::string push)
        : kernel_(std::move(kernel)), groups_(groups), push_(std::move(push)) {}
    void record(const vk::CommandBuffer& commands) override;

  private:
    std::shared_ptr<Kernel> kernel_;
    std::array<uint32_t, 3> groups_;
    std::string push_;
};

class CopyOp : public Operation {
  public:
    CopyOp(std::shared_ptr<Storage> source, std::shared_ptr<Storage> target,
           std::vector<VkBufferCopy> regions)
        : source_(std::move(source)), target_(std::move(target)), regions_(std::move(regions)) {}
    void record(const vk::CommandBuffer& commands) override;

  private:
    std::shared_ptr<Storage> source_;
    std::shared_ptr<Storage> target_;
    std::vector<VkBufferCopy> regions_;
};

class FillOp : public Operation {
  public:
    FillOp(std::shared_ptr<Storage> target, uint64_t offset, uint64_t size, uint32_t word)
        : target_(std::move(target)), offset_(offset), size_(size), word_(word) {}
    void record(const vk::CommandBuffer& commands) override;

  private:
    std::shared_ptr<Storage> target_;
    uint64_t offset_;
    uint64_t size_;
    uint32_t word_;
};

/// Writes the time at which all earlier commands are done.
class TimestampOp : public Operation {
  public:
    TimestampOp(VkQueryPool queries, uint32_t index) : queries_(queries), index_(index) {}
    void record(const vk::CommandBuffer& commands) override;

  private:
    VkQueryPool queries_;
    uint32_t index_;
};

}  // namespace vkmoe
