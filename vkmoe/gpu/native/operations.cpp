#include "operations.hpp"

namespace vkmoe {

namespace {

void global_barrier(VkCommandBuffer commands, VkPipelineStageFlags source, VkAccessFlags written,
                    VkPipelineStageFlags target, VkAccessFlags accessed) {
    VkMemoryBarrier barrier{};
    barrier.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER;
    barrier.srcAccessMask = written;
    barrier.dstAccessMask = accessed;
    vkCmdPipelineBarrier(commands, source, target, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

constexpr VkAccessFlags kWrites = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;

}  // namespace

Scope::Scope(bool has_compute)
    : stages(VK_PIPELINE_STAGE_TRANSFER_BIT),
      access(VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT) {
    if (!has_compute) return;
    stages |= VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT;
    access |= VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT;
}

void BeginOp::record(const vk::CommandBuffer& commands) {
    commands_ = commands;
    if (n_queries_ > 0) vkCmdResetQueryPool(commands, queries_, 0, n_queries_);
    global_barrier(commands, VK_PIPELINE_STAGE_ALL_COMMANDS_BIT | VK_PIPELINE_STAGE_HOST_BIT,
                   VK_ACCESS_MEMORY_WRITE_BIT | VK_ACCESS_HOST_WRITE_BIT, scope_.stages,
                   scope_.access);
}

void BarrierOp::record(const vk::CommandBuffer& commands) {
    global_barrier(commands, scope_.stages, scope_.access & kWrites, scope_.stages, scope_.access);
}

void EndOp::record(const vk::CommandBuffer& commands) {
    global_barrier(commands, scope_.stages, scope_.access & kWrites, VK_PIPELINE_STAGE_HOST_BIT,
                   VK_ACCESS_HOST_READ_BIT | VK_ACCESS_HOST_WRITE_BIT);
}

void DispatchOp::record(const vk::CommandBuffer& commands) {
    kernel_->record(commands, groups_, push_);
}

void CopyOp::record(const vk::CommandBuffer& commands) {
    vkCmdCopyBuffer(commands, source_->handle(), target_->handle(),
                    static_cast<uint32_t>(regions_.size()), regions_.data());
}

void FillOp::record(const vk::CommandBuffer& commands) {
    vkCmdFillBuffer(commands, target_->handle(), offset_, size_, word_);
}

void TimestampOp::record(const vk::CommandBuffer& commands) {
    vkCmdWriteTimestamp(commands, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, queries_, index_);
}

}  // namespace vkmoe
