#include "kompute_calls.hpp"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

VULKAN_HPP_DEFAULT_DISPATCH_LOADER_DYNAMIC_STORAGE

namespace vkmoe {

namespace {

thread_local KomputeScope* current_scope = nullptr;

/// Makes one of Kompute's calls; false if it failed or an earlier one in the scope has.
template <class Function, class... Arguments>
bool guarded(const char* call, Function function, Arguments... arguments) {
    KomputeScope* const scope = KomputeScope::current();
    if (scope != nullptr && scope->failed()) return false;
    const VkResult result = attempt(call, function, arguments...);
    if (result == VK_SUCCESS) return true;
    if (scope != nullptr) scope->fail(call, result);
    return false;
}

// vkCreate<Name> and vkDestroy<Name> for the objects that Kompute makes.
#define VKMOE_CREATE(Name, kind)                                                              \
    VKAPI_ATTR VkResult VKAPI_CALL create_##Name(                                             \
        VkDevice device, const Vk##Name##CreateInfo* info, const VkAllocationCallbacks* host, \
        Vk##Name* out) {                                                                      \
        *out = VK_NULL_HANDLE;                                                                \
        if (guarded("vkCreate" #Name, vkCreate##Name, device, info, host, out))               \
            count_created(kind);                                                              \
        return VK_SUCCESS;                                                                    \
    }
#define VKMOE_DESTROY(vulkan_function, Name, kind)                                        \
    VKAPI_ATTR void VKAPI_CALL destroy_##Name(VkDevice device, Vk##Name handle,           \
                                              const VkAllocationCallbacks* host) {        \
        if (handle == VK_NULL_HANDLE) return;                                             \
        vulkan_function(device, handle, host);                                            \
        count_destroyed(kind);                                                            \
    }
#define VKMOE_OBJECT(Name, kind) \
    VKMOE_CREATE(Name, kind)     \
    VKMOE_DESTROY(vkDestroy##Name, Name, kind)

VKMOE_OBJECT(DescriptorPool, "descriptor_pool")
VKMOE_OBJECT(DescriptorSetLayout, "descriptor_set_layout")
VKMOE_OBJECT(ShaderModule, "shader_module")
VKMOE_OBJECT(PipelineLayout, "pipeline_layout")
VKMOE_OBJECT(PipelineCache, "pipeline_cache")
VKMOE_OBJECT(CommandPool, "command_pool")
VKMOE_DESTROY(vkDestroyBuffer, Buffer, "buffer")

VKAPI_ATTR VkResult VKAPI_CALL create_buffer(VkDevice device, const VkBufferCreateInfo* info,
                                             const VkAllocationCallbacks* host, VkBuffer* out) {
    *out = VK_NULL_HANDLE;
    VkBufferCreateInfo usable = *info;
    // A tensor of type eStorage could otherwise be neither copied nor filled, nor be shared.
    usable.usage |= VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
    if (KomputeScope::current() != nullptr) KomputeScope::current()->context().share(usable);
    if (guarded("vkCreateBuffer", vkCreateBuffer, device, &usable, host, out)) {
        count_created("buffer");
    }
    return VK_SUCCESS;
}

VKAPI_ATTR void VKAPI_CALL buffer_requirements(VkDevice device, VkBuffer buffer,
                                               VkMemoryRequirements* out) {
    *out = {4, 4, UINT32_MAX};
    if (buffer != VK_NULL_HANDLE) vkGetBufferMemoryRequirements(device, buffer, out);
}

/// Live allocations of Kompute's tensors: it frees them without saying how large they were.
struct Allocations {
    struct Entry {
        std::shared_ptr<HeapBytes> heaps;
        uint32_t memory_type;
        uint64_t n_bytes;
    };
    std::mutex mutex;
    std::map<std::pair<VkDevice, VkDeviceMemory>, Entry> live;
};

// Never destroyed, like the ledger.
Allocations& allocations() {
    static auto* const instance = new Allocations;
    return *instance;
}

VKAPI_ATTR VkResult VKAPI_CALL allocate_memory(VkDevice device, const VkMemoryAllocateInfo* info,
                                               const VkAllocationCallbacks* host,
                                               VkDeviceMemory* out) {
    *out = VK_NULL_HANDLE;
    if (!guarded("vkAllocateMemory", vkAllocateMemory, device, info, host, out)) return VK_SUCCESS;
    count_created("memory");
    if (KomputeScope::current() == nullptr) return VK_SUCCESS;
    const auto& heaps = KomputeScope::current()->context().heap_bytes();
    heaps->allocated(info->memoryTypeIndex, info->allocationSize);
    const std::lock_guard lock(allocations().mutex);
    allocations().live[{device, *out}] = {heaps, info->memoryTypeIndex, info->allocationSize};
    return VK_SUCCESS;
}

VKAPI_ATTR void VKAPI_CALL free_memory(VkDevice device, VkDeviceMemory memory,
                                       const VkAllocationCallbacks* host) {
    if (memory == VK_NULL_HANDLE) return;
    {
        // Out of the book before the handle can be given to another allocation.
        const std::lock_guard lock(allocations().mutex);
        const auto found = allocations().live.find({device, memory});
        if (found != allocations().live.end()) {
            const auto& entry = found->second;
            entry.heaps->freed(entry.memory_type, entry.n_bytes);
            allocations().live.erase(found);
        }
    }
    vkFreeMemory(device, memory, host);
    count_destroyed("memory");
}

VKAPI_ATTR VkResult VKAPI_CALL bind_memory(VkDevice device, VkBuffer buffer, VkDeviceMemory memory,
                                           VkDeviceSize offset) {
    guarded("vkBindBufferMemory", vkBindBufferMemory, device, buffer, memory, offset);
    return VK_SUCCESS;
}

VKAPI_ATTR VkResult VKAPI_CALL allocate_sets(VkDevice device,
                                             const VkDescriptorSetAllocateInfo* info,
                                             VkDescriptorSet* out) {
    *out = VK_NULL_HANDLE;  // sets die with their pool and are not counted
    guarded("vkAllocateDescriptorSets", vkAllocateDescriptorSets, device, info, out);
    return VK_SUCCESS;
}

VKAPI_ATTR void VKAPI_CALL update_sets(VkDevice device, uint32_t n_writes,
                                       const VkWriteDescriptorSet* writes, uint32_t n_copies,
                                       const VkCopyDescriptorSet* copies) {
    const KomputeScope* const scope = KomputeScope::current();
    if (scope != nullptr && scope->failed()) return;
    vkUpdateDescriptorSets(device, n_writes, writes, n_copies, copies);
}

// The kernel that Kompute makes a pipeline for may share one that is there.
VKAPI_ATTR VkResult VKAPI_CALL create_pipelines(VkDevice device, VkPipelineCache cache, uint32_t n,
                                                const VkComputePipelineCreateInfo* infos,
                                                const VkAllocationCallbacks* host,
                                                VkPipeline* out) {
    for (uint32_t i = 0; i < n; ++i) out[i] = VK_NULL_HANDLE;
    KomputeScope* const scope = KomputeScope::current();
    if (n != 1 || scope == nullptr || scope->key() == nullptr) {
        if (scope != nullptr) scope->fail("vkCreateComputePipelines", VK_ERROR_UNKNOWN);
        return VK_SUCCESS;  // Kompute makes one at a time, and only kernels make any
    }
    const PipelineKey& key = *scope->key();
    VkComputePipelineCreateInfo ours = *infos;
    VkPipelineShaderStageRequiredSubgroupSizeCreateInfo required{};
    required.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO;
    required.requiredSubgroupSize = key.subgroup_size;
    ours.flags |= key.flags;
    if (key.subgroup_size != 0) {
        ours.stage.pNext = &required;  // Kompute chains nothing of its own
        ours.stage.flags |= VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
    }
    *out = use_pipeline(key, [&]() -> VkPipeline {
        VkPipeline made = VK_NULL_HANDLE;
        guarded("vkCreateComputePipelines", vkCreateComputePipelines, device, cache, 1u, &ours,
                host, &made);
        return made;
    });
    scope->made(*out);
    return VK_SUCCESS;
}

VKAPI_ATTR void VKAPI_CALL destroy_pipeline(VkDevice device, VkPipeline pipeline,
                                            const VkAllocationCallbacks* host) {
    const VkPipeline gone =
        pipeline == VK_NULL_HANDLE ? VK_NULL_HANDLE : leave_pipeline(device, pipeline);
    if (gone != VK_NULL_HANDLE) vkDestroyPipeline(device, gone, host);
}

VKAPI_ATTR VkResult VKAPI_CALL allocate_commands(VkDevice device,
                                                 const VkCommandBufferAllocateInfo* info,
                                                 VkCommandBuffer* out) {
    for (uint32_t i = 0; i < info->commandBufferCount; ++i) out[i] = VK_NULL_HANDLE;
    if (guarded("vkAllocateCommandBuffers", vkAllocateCommandBuffers, device, info, out)) {
        for (uint32_t i = 0; i < info->commandBufferCount; ++i) count_created("command_buffer");
    }
    return VK_SUCCESS;
}

VKAPI_ATTR void VKAPI_CALL free_commands(VkDevice device, VkCommandPool pool, uint32_t n,
                                         const VkCommandBuffer* buffers) {
    for (uint32_t i = 0; i < n; ++i) {
        if (buffers[i] == VK_NULL_HANDLE) continue;
        vkFreeCommandBuffers(device, pool, 1, &buffers[i]);
        count_destroyed("command_buffer");
    }
}

VKAPI_ATTR VkResult VKAPI_CALL begin_commands(VkCommandBuffer buffer,
                                              const VkCommandBufferBeginInfo* info) {
    guarded("vkBeginCommandBuffer", vkBeginCommandBuffer, buffer, info);
    return VK_SUCCESS;
}

VKAPI_ATTR VkResult VKAPI_CALL end_commands(VkCommandBuffer buffer) {
    guarded("vkEndCommandBuffer", vkEndCommandBuffer, buffer);
    return VK_SUCCESS;
}

}  // namespace

KomputeScope::KomputeScope(Context& context, const PipelineKey* key)
    : context_(context), key_(key) {
    current_scope = this;
}
KomputeScope::~KomputeScope() { current_scope = nullptr; }
KomputeScope* KomputeScope::current() { return current_scope; }

void KomputeScope::fail(const char* call, VkResult result) {
    call_ = call;
    result_ = context_.note(result);
}

void KomputeScope::check(const std::string& detail) const {
    if (failed()) throw VulkanError(result_, call_, detail);
}

void fill_kompute_dispatch() {
    auto& table = VULKAN_HPP_DEFAULT_DISPATCHER;
    table.vkGetPhysicalDeviceMemoryProperties = vkGetPhysicalDeviceMemoryProperties;
    table.vkCreateBuffer = create_buffer;
    table.vkDestroyBuffer = destroy_Buffer;
    table.vkGetBufferMemoryRequirements = buffer_requirements;
    table.vkAllocateMemory = allocate_memory;
    table.vkFreeMemory = free_memory;
    table.vkBindBufferMemory = bind_memory;

    table.vkCreateDescriptorPool = create_DescriptorPool;
    table.vkDestroyDescriptorPool = destroy_DescriptorPool;
    table.vkCreateDescriptorSetLayout = create_DescriptorSetLayout;
    table.vkDestroyDescriptorSetLayout = destroy_DescriptorSetLayout;
    table.vkAllocateDescriptorSets = allocate_sets;
    table.vkUpdateDescriptorSets = update_sets;
    table.vkCreateShaderModule = create_ShaderModule;
    table.vkDestroyShaderModule = destroy_ShaderModule;
    table.vkCreatePipelineLayout = create_PipelineLayout;
    table.vkDestroyPipelineLayout = destroy_PipelineLayout;
    table.vkCreatePipelineCache = create_PipelineCache;
    table.vkDestroyPipelineCache = destroy_PipelineCache;
    table.vkCreateComputePipelines = create_pipelines;
    table.vkDestroyPipeline = destroy_pipeline;

    table.vkCreateCommandPool = create_CommandPool;
    table.vkDestroyCommandPool = destroy_CommandPool;
    table.vkAllocateCommandBuffers = allocate_commands;
    table.vkFreeCommandBuffers = free_commands;
    table.vkBeginCommandBuffer = begin_commands;
    table.vkEndCommandBuffer = end_commands;
    table.vkCmdBindPipeline = vkCmdBindPipeline;
    table.vkCmdBindDescriptorSets = vkCmdBindDescriptorSets;
    table.vkCmdPushConstants = vkCmdPushConstants;
    table.vkCmdDispatch = vkCmdDispatch;
}

}  // namespace vkmoe
