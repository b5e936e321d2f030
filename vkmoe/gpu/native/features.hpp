// Device features by name: which are there, and the structures that ask for or enable them.
#pragma once

#include <string>
#include <vector>

#include <vulkan/vulkan.h>

namespace vkmoe {

// Younger than the headers of Debian 12; the values are those of the Vulkan registry.
struct CooperativeMatrixFeatures {
    VkStructureType sType;
    void* pNext;
    VkBool32 cooperativeMatrix;
    VkBool32 robustBufferAccess;
};

struct CooperativeMatrixProperties {
    VkStructureType sType;
    void* pNext;
    VkShaderStageFlags cooperativeMatrixSupportedStages;
};

struct CooperativeMatrixShape {
    VkStructureType sType;
    void* pNext;
    uint32_t MSize, NSize, KSize;
    int32_t AType, BType, CType, ResultType;
    VkBool32 saturatingAccumulation;
    int32_t scope;
};

constexpr auto kCooperativeMatrixFeatures = static_cast<VkStructureType>(1000506000);
constexpr auto kCooperativeMatrixShape = static_cast<VkStructureType>(1000506001);
constexpr auto kCooperativeMatrixProperties = static_cast<VkStructureType>(1000506002);

/// The feature structures vkmoe knows, each a row with a name.
class FeatureSet {
  public:
    FeatureSet();
    FeatureSet(const FeatureSet&) = delete;
    FeatureSet& operator=(const FeatureSet&) = delete;

    /// Names of the known features that the device has.
    static std::vector<std::string> available(VkPhysicalDevice physical);

    /// Enables `names`: the chain to hang on VkDeviceCreateInfo, and the extensions it needs.
    /// Throws std::invalid_argument for an unknown name, VulkanError listing those that are absent.
    void enable(VkPhysicalDevice physical, const std::vector<std::string>& names);

    const VkPhysicalDeviceFeatures2* chain() const { return &core_; }
    const std::vector<const char*>& extensions() const { return extensions_; }

  private:
    struct Row {
        const char* name;
        VkBaseOutStructure* structure;  // null: a member of the core structure
        VkBool32* flag;
        uint32_t core_since;    // API version from which no extension is needed; 0: never
        const char* extension;  // null: core only
    };
    std::vector<Row> rows();
    void link(VkBaseOutStructure* structure);

    VkPhysicalDeviceFeatures2 core_{};
    VkPhysicalDeviceBufferDeviceAddressFeatures address_{};
    VkPhysicalDevice8BitStorageFeatures storage8_{};
    VkPhysicalDevice16BitStorageFeatures storage16_{};
    VkPhysicalDeviceShaderFloat16Int8Features float16_int8_{};
    VkPhysicalDeviceScalarBlockLayoutFeatures scalar_{};
    VkPhysicalDeviceSubgroupSizeControlFeatures subgroup_size_{};
    VkPhysicalDeviceHostQueryResetFeatures host_query_reset_{};
    VkPhysicalDeviceVulkanMemoryModelFeatures memory_model_{};
    VkPhysicalDeviceShaderIntegerDotProductFeatures integer_dot_{};
    CooperativeMatrixFeatures cooperative_matrix_{};
    VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR executables_{};
    std::vector<const char*> extensions_;
};

bool contains(const std::vector<std::string>& names, const std::string& name);

/// Extension names the device offers.
std::vector<std::string> device_extensions(VkPhysicalDevice physical);

}  // namespace vkmoe
