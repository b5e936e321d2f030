#include "errors.hpp"

#include <utility>

namespace vkmoe {

namespace {

#define VKMOE_RESULT(name) {#name, name}
const std::pair<const char*, VkResult> kResults[] = {
    VKMOE_RESULT(VK_SUCCESS),
    VKMOE_RESULT(VK_NOT_READY),
    VKMOE_RESULT(VK_TIMEOUT),
    VKMOE_RESULT(VK_INCOMPLETE),
    VKMOE_RESULT(VK_ERROR_OUT_OF_HOST_MEMORY),
    VKMOE_RESULT(VK_ERROR_OUT_OF_DEVICE_MEMORY),
    VKMOE_RESULT(VK_ERROR_INITIALIZATION_FAILED),
    VKMOE_RESULT(VK_ERROR_DEVICE_LOST),
    VKMOE_RESULT(VK_ERROR_MEMORY_MAP_FAILED),
    VKMOE_RESULT(VK_ERROR_LAYER_NOT_PRESENT),
    VKMOE_RESULT(VK_ERROR_EXTENSION_NOT_PRESENT),
    VKMOE_RESULT(VK_ERROR_FEATURE_NOT_PRESENT),
    VKMOE_RESULT(VK_ERROR_INCOMPATIBLE_DRIVER),
    VKMOE_RESULT(VK_ERROR_TOO_MANY_OBJECTS),
    VKMOE_RESULT(VK_ERROR_FORMAT_NOT_SUPPORTED),
    VKMOE_RESULT(VK_ERROR_FRAGMENTED_POOL),
    VKMOE_RESULT(VK_ERROR_UNKNOWN),
    VKMOE_RESULT(VK_ERROR_OUT_OF_POOL_MEMORY),
    VKMOE_RESULT(VK_ERROR_INVALID_EXTERNAL_HANDLE),
    VKMOE_RESULT(VK_ERROR_FRAGMENTATION),
    VKMOE_RESULT(VK_ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS),
    VKMOE_RESULT(VK_ERROR_VALIDATION_FAILED_EXT),
    VKMOE_RESULT(VK_ERROR_INVALID_SHADER_NV),
    VKMOE_RESULT(VK_PIPELINE_COMPILE_REQUIRED),
};
#undef VKMOE_RESULT

std::string message(VkResult result, const std::string& call, const std::string& detail) {
    return call + ": " + result_name(result) + (detail.empty() ? "" : " (" + detail + ")");
}

}  // namespace

VulkanError::VulkanError(VkResult result, std::string call, const std::string& detail)
    : std::runtime_error(message(result, call, detail)), result(result), call(std::move(call)) {}

std::string result_name(VkResult result) {
    for (const auto& [name, value] : kResults) {
        if (value == result) return name;
    }
    return "VkResult(" + std::to_string(static_cast<int>(result)) + ")";
}

VkResult result_from_name(const std::string& name) {
    for (const auto& [known, value] : kResults) {
        if (name == known) return value;
    }
    throw std::invalid_argument("unknown VkResult name: " + name);
}

}  // namespace vkmoe
