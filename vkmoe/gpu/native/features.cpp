#include "features.hpp"

#include <algorithm>

#include "ledger.hpp"

namespace vkmoe {

namespace {

template <class Structure>
VkBaseOutStructure* base(Structure& structure) {
    return reinterpret_cast<VkBaseOutStructure*>(&structure);
}

}  // namespace

bool contains(const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::string> device_extensions(VkPhysicalDevice physical) {
    uint32_t n = 0;
    VKMOE_CHECKED(vkEnumerateDeviceExtensionProperties, physical, nullptr, &n, nullptr);
    std::vector<VkExtensionProperties> properties(n);
    VKMOE_CHECKED(vkEnumerateDeviceExtensionProperties, physical, nullptr, &n, properties.data());
    std::vector<std::string> names;
    for (const auto& property : properties) names.emplace_back(property.extensionName);
    return names;
}

FeatureSet::FeatureSet() {
    core_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    address_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_BUFFER_DEVICE_ADDRESS_FEATURES;
    storage8_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_8BIT_STORAGE_FEATURES;
    storage16_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_16BIT_STORAGE_FEATURES;
    float16_int8_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES;
    scalar_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SCALAR_BLOCK_LAYOUT_FEATURES;
    subgroup_size_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES;
    host_query_reset_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_HOST_QUERY_RESET_FEATURES;
    memory_model_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_MEMORY_MODEL_FEATURES;
    integer_dot_.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES;
    cooperative_matrix_.sType = kCooperativeMatrixFeatures;
    executables_.sType =
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR;
}

std::vector<FeatureSet::Row> FeatureSet::rows() {
    constexpr uint32_t v10 = VK_API_VERSION_1_0, v12 = VK_API_VERSION_1_2, v13 = VK_API_VERSION_1_3;
    return {
        {"buffer_device_address", base(address_), &address_.bufferDeviceAddress, v12, nullptr},
        {"storage_8bit", base(storage8_), &storage8_.storageBuffer8BitAccess, v12, nullptr},
        {"storage_16bit", base(storage16_), &storage16_.storageBuffer16BitAccess, v12, nullptr},
        {"float16", base(float16_int8_), &float16_int8_.shaderFloat16, v12, nullptr},
        {"int8", base(float16_int8_), &float16_int8_.shaderInt8, v12, nullptr},
        {"int64", nullptr, &core_.features.shaderInt64, v10, nullptr},
        {"int16", nullptr, &core_.features.shaderInt16, v10, nullptr},
        {"scalar_layout", base(scalar_), &scalar_.scalarBlockLayout, v12, nullptr},
        {"subgroup_size_control", base(subgroup_size_), &subgroup_size_.subgroupSizeControl, v13,
         "VK_EXT_subgroup_size_control"},
        {"compute_full_subgroups", base(subgroup_size_), &subgroup_size_.computeFullSubgroups, v13,
         "VK_EXT_subgroup_size_control"},
        {"host_query_reset", base(host_query_reset_), &host_query_reset_.hostQueryReset, v12,
         nullptr},
        {"memory_model", base(memory_model_), &memory_model_.vulkanMemoryModel, v12, nullptr},
        {"memory_model_device_scope", base(memory_model_),
         &memory_model_.vulkanMemoryModelDeviceScope, v12, nullptr},
        {"integer_dot_product", base(integer_dot_), &integer_dot_.shaderIntegerDotProduct, v13,
         "VK_KHR_shader_integer_dot_product"},
        {"cooperative_matrix", base(cooperative_matrix_), &cooperative_matrix_.cooperativeMatrix,
         0, "VK_KHR_cooperative_matrix"},
        {"pipeline_statistics", base(executables_), &executables_.pipelineExecutableInfo, 0,
         "VK_KHR_pipeline_executable_properties"},
    };
}

void FeatureSet::link(VkBaseOutStructure* structure) {
    if (structure == nullptr) return;
    auto* last = base(core_);
    while (last->pNext != nullptr) {
        last = last->pNext;
        if (last == structure) return;
    }
    last->pNext = structure;
}

std::vector<std::string> FeatureSet::available(VkPhysicalDevice physical) {
    VkPhysicalDeviceProperties properties;
    vkGetPhysicalDeviceProperties(physical, &properties);
    if (properties.apiVersion < VK_API_VERSION_1_1) return {};  // no vkGetPhysicalDeviceFeatures2
    const auto extensions = device_extensions(physical);
    FeatureSet present;
    std::vector<Row> known;
    for (const Row& row : present.rows()) {
        const bool in_core = row.core_since != 0 && properties.apiVersion >= row.core_since;
        if (!in_core && !(row.extension && contains(extensions, row.extension))) continue;
        present.link(row.structure);
        known.push_back(row);
    }
    vkGetPhysicalDeviceFeatures2(physical, &present.core_);
    std::vector<std::string> names;
    for (const Row& row : known) {
        if (*row.flag) names.emplace_back(row.name);
    }
    return names;
}

void FeatureSet::enable(VkPhysicalDevice physical, const std::vector<std::string>& names) {
    VkPhysicalDeviceProperties properties;
    vkGetPhysicalDeviceProperties(physical, &properties);
    const auto present = available(physical);
    const auto known = rows();
    std::string missing;
    for (const auto& name : names) {
        const auto row = std::find_if(known.begin(), known.end(),
                                      [&](const Row& candidate) { return name == candidate.name; });
        if (row == known.end()) throw std::invalid_argument("unknown device feature: " + name);
        if (!contains(present, name)) {
            missing += (missing.empty() ? "" : ", ") + name;
            continue;
        }
        *row->flag = VK_TRUE;
        link(row->structure);
        const bool in_core = row->core_since != 0 && properties.apiVersion >= row->core_since;
        if (!in_core) extensions_.push_back(row->extension);
    }
    if (!missing.empty()) {
        throw VulkanError(VK_ERROR_FEATURE_NOT_PRESENT, "vkCreateDevice",
                          std::string(properties.deviceName) + " lacks " + missing);
    }
}

}  // namespace vkmoe
