// One opened device: VkDevice, its queues and the facts every other class needs.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <vulkan/vulkan.hpp>

#include "command_pool.hpp"
#include "fence_pool.hpp"
#include "heap_bytes.hpp"
#include "instance.hpp"

namespace vkmoe {

struct QueueFacts {
    VkQueue handle = VK_NULL_HANDLE;
    uint32_t family = 0;
    bool has_compute = true;
    uint32_t timestamp_bits = 0;
};

/// A queue; VkQueue is not thread-safe, so `mutex` is held around every use.
struct Queue : QueueFacts {
    std::mutex mutex;
};

/// Held alive by everything made on the device; VkDevice dies with the last of them.
class Context {
  public:
    Context(std::shared_ptr<Instance> instance, size_t index,
            const std::vector<std::string>& features);

    VkDevice device() const { return device_.get(); }
    VkPhysicalDevice physical() const { return physical_; }
    Instance& instance() const { return *instance_; }
    const VkPhysicalDeviceProperties& properties() const { return properties_; }
    const VkPhysicalDeviceMemoryProperties& memory() const { return memory_; }
    const std::shared_ptr<HeapBytes>& heap_bytes() const { return heap_bytes_; }
    bool has_addresses() const { return has_addresses_; }
    /// Whether compute pipelines may require full subgroups of this size.
    bool takes_subgroup_size(uint32_t size) const;
    /// Whether compilers keep statistics of pipelines.
    bool has_statistics() const { return has_statistics_; }
    /// Queries are reset by the host; otherwise by commands, which need a queue with compute.
    bool resets_queries() const { return resets_queries_; }
    bool has_timestamps(const QueueFacts& queue) const {
        return queue.timestamp_bits > 0 && (queue.has_compute || resets_queries_);
    }
    /// Whether a timestamp that happens after another is not lower, on whichever queues.
    bool has_common_clock() const { return calibrated_ || !has_upload_queue(); }

    Queue& compute_queue() { return compute_; }
    Queue& upload_queue() { return has_upload_queue() ? upload_ : compute_; }
    bool has_upload_queue() const { return upload_.handle != VK_NULL_HANDLE; }
    /// Throws std::invalid_argument for a name other than "compute" and "upload".
    Queue& queue(const std::string& name);
    /// Fills in the sharing of a buffer: concurrent where the queues are of two families.
    void share(VkBufferCreateInfo& info) const;

    /// Throws DEVICE_LOST if an earlier call has reported it.
    void require_alive(const char* call) const;
    /// Remembers a lost device; returns `result` unchanged.
    VkResult note(VkResult result);
    bool lost() const { return lost_; }

    CommandPools& upload_pools() { return upload_pools_; }
    FencePool& fences() { return fences_; }
    const std::shared_ptr<vk::Device>& kp_device() const { return kp_device_; }
    const std::shared_ptr<vk::PhysicalDevice>& kp_physical() const { return kp_physical_; }

  private:
    void choose_families(std::vector<VkDeviceQueueCreateInfo>& infos);
    void create_device(const std::vector<std::string>& features);

    std::shared_ptr<Instance> instance_;
    VkPhysicalDevice physical_;
    VkPhysicalDeviceProperties properties_{};
    VkPhysicalDeviceMemoryProperties memory_{};
    std::shared_ptr<HeapBytes> heap_bytes_;
    bool has_addresses_ = false;
    bool has_statistics_ = false;
    bool resets_queries_ = false;
    VkPhysicalDeviceSubgroupSizeControlProperties subgroup_sizes_{};  // zero: not enabled
    bool calibrated_ = false;
    std::atomic<bool> lost_{false};
    Owned<VkDevice> device_;
    Queue compute_;
    Queue upload_;
    uint32_t upload_index_ = 0;  // index of the upload queue within its family
    bool wants_upload_ = false;
    uint32_t families_[2] = {0, 0};
    std::shared_ptr<vk::Device> kp_device_;
    std::shared_ptr<vk::PhysicalDevice> kp_physical_;
    CommandPools upload_pools_;
    FencePool fences_;
};

}  // namespace vkmoe
