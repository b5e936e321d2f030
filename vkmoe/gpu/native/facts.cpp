#include "facts.hpp"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include <pybind11/stl.h>

#include "features.hpp"
#include "ledger.hpp"

namespace py = pybind11;

namespace vkmoe {

namespace {

struct FlagName {
    uint32_t bit;
    const char* name;
};

constexpr FlagName kMemoryFlags[] = {
    {VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, "DEVICE_LOCAL"},
    {VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT, "HOST_VISIBLE"},
    {VK_MEMORY_PROPERTY_HOST_COHERENT_BIT, "HOST_COHERENT"},
    {VK_MEMORY_PROPERTY_HOST_CACHED_BIT, "HOST_CACHED"},
    {VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT, "LAZILY_ALLOCATED"},
    {VK_MEMORY_PROPERTY_PROTECTED_BIT, "PROTECTED"},
    {VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD, "DEVICE_COHERENT_AMD"},
    {VK_MEMORY_PROPERTY_DEVICE_UNCACHED_BIT_AMD, "DEVICE_UNCACHED_AMD"},
};
constexpr FlagName kQueueFlags[] = {
    {VK_QUEUE_GRAPHICS_BIT, "GRAPHICS"},   {VK_QUEUE_COMPUTE_BIT, "COMPUTE"},
    {VK_QUEUE_TRANSFER_BIT, "TRANSFER"},   {VK_QUEUE_SPARSE_BINDING_BIT, "SPARSE_BINDING"},
    {VK_QUEUE_PROTECTED_BIT, "PROTECTED"}, {0x20, "VIDEO_DECODE"},
    {0x40, "VIDEO_ENCODE"},
};

template <size_t n>
py::list flag_names(const FlagName (&table)[n], uint32_t flags) {
    py::list names;
    for (const auto& [bit, name] : table) {
        if (flags & bit) names.append(name);
    }
    return names;
}

const char* type_name(VkPhysicalDeviceType type) {
    switch (type) {
        case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: return "discrete";
        case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: return "integrated";
        case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: return "virtual";
        case VK_PHYSICAL_DEVICE_TYPE_CPU: return "cpu";
        default: return "other";
    }
}

std::string hex(const uint8_t (&bytes)[VK_UUID_SIZE]) {
    std::string text;
    char digits[3];
    for (const uint8_t byte : bytes) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        text += digits;
    }
    return text;
}

/// The property structures vkmoe reads. Structures a driver does not know stay zero.
struct Properties {
    VkPhysicalDeviceProperties2 core{};
    VkPhysicalDeviceDriverProperties driver{};
    VkPhysicalDeviceIDProperties id{};
    VkPhysicalDeviceSubgroupProperties subgroup{};
    VkPhysicalDeviceSubgroupSizeControlProperties subgroup_sizes{};
    VkPhysicalDeviceMaintenance3Properties maintenance3{};
    VkPhysicalDeviceMaintenance4Properties maintenance4{};

    Properties(VkPhysicalDevice physical, const std::vector<std::string>& extensions) {
        core.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
        vkGetPhysicalDeviceProperties(physical, &core.properties);
        const uint32_t version = core.properties.apiVersion;
        if (version < VK_API_VERSION_1_1) return;
        const auto has = [&](uint32_t since, const char* extension) {
            return version >= since || std::find(extensions.begin(), extensions.end(),
                                                 extension) != extensions.end();
        };
        add(id, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES);
        add(subgroup, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES);
        add(maintenance3, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES);
        if (has(VK_API_VERSION_1_2, "VK_KHR_driver_properties"))
            add(driver, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES);
        if (has(VK_API_VERSION_1_3, "VK_EXT_subgroup_size_control"))
            add(subgroup_sizes, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES);
        if (has(VK_API_VERSION_1_3, "VK_KHR_maintenance4"))
            add(maintenance4, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES);
        vkGetPhysicalDeviceProperties2(physical, &core);
    }
    Properties(const Properties&) = delete;

  private:
    template <class Structure>
    void add(Structure& structure, VkStructureType type) {
        structure.sType = type;
        structure.pNext = core.pNext;
        core.pNext = &structure;
    }
};

/// "heaps" and "memory_types". Drivers before Vulkan 1.1 know no chains of structures.
py::dict memory_facts(VkPhysicalDevice physical, bool has_budget, bool has_chains) {
    VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{};
    budget.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT;
    VkPhysicalDeviceMemoryProperties2 memory{};
    memory.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2;
    memory.pNext = has_budget ? &budget : nullptr;
    if (has_chains) {
        vkGetPhysicalDeviceMemoryProperties2(physical, &memory);
    } else {
        vkGetPhysicalDeviceMemoryProperties(physical, &memory.memoryProperties);
    }
    const auto& properties = memory.memoryProperties;
    py::list heaps, types;
    for (uint32_t i = 0; i < properties.memoryHeapCount; ++i) {
        py::dict heap;
        heap["size"] = properties.memoryHeaps[i].size;
        heap["device_local"] =
            (properties.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) != 0;
        heap["budget"] = has_budget ? py::cast(budget.heapBudget[i]) : py::none();
        heap["usage"] = has_budget ? py::cast(budget.heapUsage[i]) : py::none();
        heaps.append(heap);
    }
    for (uint32_t i = 0; i < properties.memoryTypeCount; ++i) {
        py::dict type;
        type["heap"] = properties.memoryTypes[i].heapIndex;
        type["flags"] = flag_names(kMemoryFlags, properties.memoryTypes[i].propertyFlags);
        types.append(type);
    }
    py::dict facts;
    facts["heaps"] = heaps;
    facts["memory_types"] = types;
    return facts;
}

bool has_budget(const std::vector<std::string>& extensions) {
    return std::find(extensions.begin(), extensions.end(), "VK_EXT_memory_budget") !=
           extensions.end();
}

py::list queue_family_facts(VkPhysicalDevice physical) {
    uint32_t n = 0;
    vkGetPhysicalDeviceQueueFamilyProperties(physical, &n, nullptr);
    std::vector<VkQueueFamilyProperties> families(n);
    vkGetPhysicalDeviceQueueFamilyProperties(physical, &n, families.data());
    py::list facts;
    for (const auto& family : families) {
        py::dict entry;
        entry["flags"] = flag_names(kQueueFlags, family.queueFlags);
        entry["count"] = family.queueCount;
        facts.append(entry);
    }
    return facts;
}

/// Names of VkComponentTypeKHR's first values; younger ones have none.
constexpr const char* kComponents[] = {"f16", "f32", "f64", "s8",  "s16", "s32",
                                       "s64", "u8",  "u16", "u32", "u64"};
constexpr int32_t kSubgroupScope = 3;  // VK_SCOPE_SUBGROUP_KHR

/// Shapes of the matrices that subgroups of compute shaders multiply: [rows of a, columns of b,
/// columns of a, type of a and b, type of what is added and results]; no saturating ones.
py::list matrix_shapes(VkInstance instance, VkPhysicalDevice physical,
                       const std::vector<std::string>& features) {
    using List = VkResult(VKAPI_PTR*)(VkPhysicalDevice, uint32_t*, CooperativeMatrixShape*);
    constexpr auto kCall = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR";
    const auto list = reinterpret_cast<List>(vkGetInstanceProcAddr(instance, kCall));
    py::list shapes;
    if (!contains(features, "cooperative_matrix") || list == nullptr) return shapes;
    CooperativeMatrixProperties stages{};
    stages.sType = kCooperativeMatrixProperties;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &stages;
    vkGetPhysicalDeviceProperties2(physical, &properties);
    if (!(stages.cooperativeMatrixSupportedStages & VK_SHADER_STAGE_COMPUTE_BIT)) return shapes;
    uint32_t n = 0;
    checked(kCall, list, physical, &n, nullptr);
    CooperativeMatrixShape empty{};
    empty.sType = kCooperativeMatrixShape;
    std::vector<CooperativeMatrixShape> found(n, empty);
    checked(kCall, list, physical, &n, found.data());
    const auto named = [](int32_t type) { return type >= 0 && type < int(std::size(kComponents)); };
    for (uint32_t i = 0; i < n; ++i) {
        const CooperativeMatrixShape& shape = found[i];
        const bool plain = shape.scope == kSubgroupScope && !shape.saturatingAccumulation &&
                           shape.AType == shape.BType && shape.CType == shape.ResultType;
        if (!plain || !named(shape.AType) || !named(shape.CType)) continue;
        shapes.append(py::make_tuple(shape.MSize, shape.NSize, shape.KSize,
                                     kComponents[shape.AType], kComponents[shape.CType]));
    }
    return shapes;
}

py::dict limit_facts(const Properties& properties) {
    const VkPhysicalDeviceLimits& limits = properties.core.properties.limits;
    const uint64_t max_allocation = properties.maintenance3.maxMemoryAllocationSize;
    const uint64_t max_buffer = properties.maintenance4.maxBufferSize;
    const auto triple = [](const uint32_t(&value)[3]) {
        return py::cast(std::vector<uint32_t>(value, value + 3));
    };
    py::dict facts;
    facts["max_storage_buffer_range"] = limits.maxStorageBufferRange;
    // 1 GiB is what Vulkan 1.1 guarantees; a driver that does not say gets no more.
    facts["max_memory_allocation_size"] = max_allocation ? max_allocation : uint64_t{1} << 30;
    facts["max_buffer_size"] = max_buffer       ? max_buffer
                               : max_allocation ? max_allocation
                                                : uint64_t{1} << 30;
    facts["max_memory_allocation_count"] = limits.maxMemoryAllocationCount;
    facts["max_workgroup_size"] = triple(limits.maxComputeWorkGroupSize);
    facts["max_workgroup_invocations"] = limits.maxComputeWorkGroupInvocations;
    facts["max_workgroup_count"] = triple(limits.maxComputeWorkGroupCount);
    facts["max_shared_memory"] = limits.maxComputeSharedMemorySize;
    facts["max_push_constants"] = limits.maxPushConstantsSize;
    facts["timestamp_period"] = limits.timestampPeriod;
    facts["min_storage_buffer_offset_alignment"] = limits.minStorageBufferOffsetAlignment;
    facts["non_coherent_atom_size"] = limits.nonCoherentAtomSize;
    return facts;
}

}  // namespace

py::dict device_facts(VkInstance instance, VkPhysicalDevice physical, uint32_t index) {
    const auto extensions = device_extensions(physical);
    const Properties properties(physical, extensions);
    const VkPhysicalDeviceProperties& core = properties.core.properties;
    const uint32_t subgroup_size = std::max(properties.subgroup.subgroupSize, 1u);
    const auto& sizes = properties.subgroup_sizes;
    const auto features = FeatureSet::available(physical);
    const bool takes_size = contains(features, "subgroup_size_control") &&
                            contains(features, "compute_full_subgroups") &&
                            (sizes.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0;
    const bool in_compute =
        (properties.subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0;
    const auto can = [&](VkSubgroupFeatureFlagBits operation) {
        return in_compute && (properties.subgroup.supportedOperations & operation) != 0;
    };
    const bool has_chains = core.apiVersion >= VK_API_VERSION_1_1;
    py::dict facts = memory_facts(physical, has_budget(extensions), has_chains);
    facts["index"] = index;
    facts["name"] = core.deviceName;
    facts["type"] = type_name(core.deviceType);
    facts["vendor_id"] = core.vendorID;
    facts["device_id"] = core.deviceID;
    facts["api_version"] =
        py::make_tuple(VK_API_VERSION_MAJOR(core.apiVersion), VK_API_VERSION_MINOR(core.apiVersion),
                       VK_API_VERSION_PATCH(core.apiVersion));
    facts["driver_name"] = properties.driver.driverName;
    facts["driver_info"] = properties.driver.driverInfo;
    facts["driver_id"] = static_cast<int>(properties.driver.driverID);
    facts["uuid"] = hex(properties.id.deviceUUID);
    facts["subgroup_size"] = subgroup_size;
    // A driver that does not say may choose any size that Vulkan allows.
    facts["min_subgroup_size"] = sizes.minSubgroupSize ? sizes.minSubgroupSize : 1u;
    facts["max_subgroup_size"] = sizes.maxSubgroupSize ? sizes.maxSubgroupSize : 128u;
    facts["takes_subgroup_size"] = takes_size;
    facts["subgroup_arithmetic"] = can(VK_SUBGROUP_FEATURE_ARITHMETIC_BIT);
    facts["subgroup_shuffle"] = can(VK_SUBGROUP_FEATURE_SHUFFLE_BIT);
    facts["queue_families"] = queue_family_facts(physical);
    facts["features"] = features;
    facts["matrix_shapes"] = matrix_shapes(instance, physical, features);
    facts["limits"] = limit_facts(properties);
    return facts;
}

py::list heap_facts(VkPhysicalDevice physical) {
    return memory_facts(physical, has_budget(device_extensions(physical)), true)["heaps"];
}

}  // namespace vkmoe
