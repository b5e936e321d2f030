// Compute pipelines by what goes into them. Kernels that differ in nothing but the tensors they are
// bound to share one, and some that no kernel has any more are kept for the next: a driver takes a
// tenth of a second or more for some of ours.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include <vulkan/vulkan.h>

namespace vkmoe {

/// All that a pipeline is made of; kernels bind their tensors to 0, 1, ... of set 0.
struct PipelineKey {
    VkDevice device = VK_NULL_HANDLE;
    std::string spirv{};
    std::vector<uint32_t> spec{};
    uint32_t n_tensors = 0;
    uint32_t push_bytes = 0;
    uint32_t subgroup_size = 0;  // required, in full subgroups; 0: the driver's choice
    VkPipelineCreateFlags flags = 0;

    auto parts() const {
        return std::tie(device, spirv, spec, n_tensors, push_bytes, subgroup_size, flags);
    }
    bool operator<(const PipelineKey& other) const { return parts() < other.parts(); }
};

/// Returns the pipeline of a key, with one more user (the ledger counts those that have any). Where none is alive `make` makes it, once: a
/// thread that wants it too meanwhile waits. What `make` cannot make is null, and has no user.
VkPipeline use_pipeline(const PipelineKey& key, const std::function<VkPipeline()>& make);

/// Takes a user away. Returns what has to be destroyed for it: a pipeline that has long had none,
/// or null.
VkPipeline leave_pipeline(VkDevice device, VkPipeline pipeline);

/// Forgets the pipelines of a device that is closed, none of which has users, and returns them.
std::vector<VkPipeline> forget_pipelines(VkDevice device);

}  // namespace vkmoe
