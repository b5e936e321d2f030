#include "context.hpp"

#include <stdexcept>

#include "features.hpp"
#include "kompute_calls.hpp"

namespace vkmoe {

namespace {

constexpr uint32_t kAmd = 0x1002;
constexpr uint32_t kNone = UINT32_MAX;
const float kPriorities[2] = {1.0f, 1.0f};

std::vector<VkQueueFamilyProperties> queue_families(VkPhysicalDevice physical) {
    uint32_t n = 0;
    vkGetPhysicalDeviceQueueFamilyProperties(physical, &n, nullptr);
    std::vector<VkQueueFamilyProperties> families(n);
    vkGetPhysicalDeviceQueueFamilyProperties(physical, &n, families.data());
    return families;
}

/// Families for video and optical flow (younger than our headers) also say "transfer".
constexpr VkQueueFlags kVideo = 0x20 | 0x40 | 0x100;

/// First family with all of `wanted` and none of `unwanted`, or kNone.
uint32_t find_family(const std::vector<VkQueueFamilyProperties>& families, VkQueueFlags wanted,
                     VkQueueFlags unwanted) {
    for (uint32_t i = 0; i < families.size(); ++i) {
        const VkQueueFlags flags = families[i].queueFlags;
        if ((flags & wanted) == wanted && (flags & unwanted) == 0) return i;
    }
    return kNone;
}

/// The first family besides this one that can copy.
uint32_t other_family(const std::vector<VkQueueFamilyProperties>& families, uint32_t first) {
    const VkQueueFlags copying =
        VK_QUEUE_GRAPHICS_BIT | VK_QUEUE_COMPUTE_BIT | VK_QUEUE_TRANSFER_BIT;
    for (uint32_t i = 0; i < families.size(); ++i) {
        const VkQueueFlags flags = families[i].queueFlags;
        if (i != first && (flags & copying) != 0 && (flags & kVideo) == 0) return i;
    }
    return kNone;
}

VkDeviceQueueCreateInfo queue_info(uint32_t family, uint32_t n_queues) {
    VkDeviceQueueCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    info.queueFamilyIndex = family;
    info.queueCount = n_queues;
    info.pQueuePriorities = kPriorities;
    return info;
}

VkPhysicalDeviceSubgroupSizeControlProperties subgroup_sizes(VkPhysicalDevice physical) {
    VkPhysicalDeviceSubgroupSizeControlProperties sizes{};
    sizes.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &sizes;
    vkGetPhysicalDeviceProperties2(physical, &properties);
    return sizes;
}

}  // namespace

Context::Context(std::shared_ptr<Instance> instance, size_t index,
                 const std::vector<std::string>& features)
    : instance_(std::move(instance)), physical_(instance_->physical_device(index)) {
    vkGetPhysicalDeviceProperties(physical_, &properties_);
    vkGetPhysicalDeviceMemoryProperties(physical_, &memory_);
    heap_bytes_ = std::make_shared<HeapBytes>(memory_);
    has_addresses_ = contains(features, "buffer_device_address");
    has_statistics_ = contains(features, "pipeline_statistics");
    resets_queries_ = contains(features, "host_query_reset");
    if (contains(features, "subgroup_size_control") && contains(features, "compute_full_subgroups"))
        subgroup_sizes_ = subgroup_sizes(physical_);
    create_device(features);
    kp_device_ = std::make_shared<vk::Device>(device());
    kp_physical_ = std::make_shared<vk::PhysicalDevice>(physical_);
    fill_kompute_dispatch();
}

void Context::choose_families(std::vector<VkDeviceQueueCreateInfo>& infos) {
    const auto families = queue_families(physical_);
    const VkQueueFlags graphics_compute = VK_QUEUE_GRAPHICS_BIT | VK_QUEUE_COMPUTE_BIT;
    // AMD's compute-only queues pay more per submit than the graphics family does.
    uint32_t compute = properties_.vendorID == kAmd
                           ? find_family(families, graphics_compute, 0)
                           : find_family(families, VK_QUEUE_COMPUTE_BIT, VK_QUEUE_GRAPHICS_BIT);
    if (compute == kNone) compute = find_family(families, VK_QUEUE_COMPUTE_BIT, 0);
    if (compute == kNone) {
        throw VulkanError(VK_ERROR_FEATURE_NOT_PRESENT, "vkCreateDevice", "no compute queue");
    }
    const bool own_memory = properties_.deviceType != VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU &&
                            properties_.deviceType != VK_PHYSICAL_DEVICE_TYPE_CPU;
    const bool has_second = families[compute].queueCount > 1;
    uint32_t upload = kNone;
    if (own_memory) {
        upload = find_family(families, VK_QUEUE_TRANSFER_BIT, graphics_compute | kVideo);
        // AMD's drivers have no family of copy engines, and one queue in that of graphics.
        if (upload == kNone && !has_second) upload = other_family(families, compute);
    }
    wants_upload_ = upload != kNone || has_second;
    upload_index_ = upload == kNone ? 1 : 0;
    if (upload == kNone) upload = compute;

    compute_.family = families_[0] = compute;
    compute_.timestamp_bits = families[compute].timestampValidBits;
    upload_.family = families_[1] = upload;
    upload_.timestamp_bits = families[upload].timestampValidBits;
    upload_.has_compute = (families[upload].queueFlags & VK_QUEUE_COMPUTE_BIT) != 0;
    infos.push_back(queue_info(compute, wants_upload_ && upload == compute ? 2 : 1));
    if (upload != compute) infos.push_back(queue_info(upload, 1));
}

void Context::create_device(const std::vector<std::string>& features) {
    std::vector<VkDeviceQueueCreateInfo> queues;
    choose_families(queues);
    FeatureSet enabled;
    enabled.enable(physical_, features);
    std::vector<const char*> extensions = enabled.extensions();
    const auto offered = device_extensions(physical_);
    // The specification obliges us to enable it where it is offered (MoltenVK).
    if (contains(offered, "VK_KHR_portability_subset")) {
        extensions.push_back("VK_KHR_portability_subset");
    }
    // Enabled, it promises an order of timestamps across submissions and queues. The older name
    // first: validation layers of Debian 12 do not know the other one, and say so.
    for (const char* const name : {"VK_EXT_calibrated_timestamps", "VK_KHR_calibrated_timestamps"}) {
        if (calibrated_ || !contains(offered, name)) continue;
        extensions.push_back(name);
        calibrated_ = true;
    }
    VkDeviceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    info.pNext = enabled.chain();
    info.queueCreateInfoCount = static_cast<uint32_t>(queues.size());
    info.pQueueCreateInfos = queues.data();
    info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
    info.ppEnabledExtensionNames = extensions.data();
    VkDevice handle = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateDevice, physical_, &info, nullptr, &handle);
    device_ = {"device", handle, [handle] {
                   for (const VkPipeline pipeline : forget_pipelines(handle)) {
                       vkDestroyPipeline(handle, pipeline, nullptr);
                   }
                   vkDestroyDevice(handle, nullptr);
               }};
    vkGetDeviceQueue(handle, compute_.family, 0, &compute_.handle);
    if (wants_upload_) vkGetDeviceQueue(handle, upload_.family, upload_index_, &upload_.handle);
}

Queue& Context::queue(const std::string& name) {
    if (name == "compute") return compute_queue();
    if (name == "upload") return upload_queue();
    throw std::invalid_argument("queue must be \"compute\" or \"upload\", not \"" + name + "\"");
}

void Context::share(VkBufferCreateInfo& info) const {
    if (!has_upload_queue() || families_[0] == families_[1]) return;
    info.sharingMode = VK_SHARING_MODE_CONCURRENT;
    info.queueFamilyIndexCount = 2;
    info.pQueueFamilyIndices = families_;
}

bool Context::takes_subgroup_size(uint32_t size) const {
    const bool compute = subgroup_sizes_.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT;
    return compute && (size & (size - 1)) == 0 && size >= subgroup_sizes_.minSubgroupSize &&
           size <= subgroup_sizes_.maxSubgroupSize;
}

void Context::require_alive(const char* call) const {
    if (lost_) throw VulkanError(VK_ERROR_DEVICE_LOST, call, "reported before");
}

VkResult Context::note(VkResult result) {
    if (result == VK_ERROR_DEVICE_LOST) lost_ = true;
    return result;
}

}  // namespace vkmoe
