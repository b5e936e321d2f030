// Failed Vulkan calls as exceptions, and the names of results.
#pragma once

#include <stdexcept>
#include <string>

#include <vulkan/vulkan.h>

namespace vkmoe {

/// A Vulkan call that failed: which one and with what result.
class VulkanError : public std::runtime_error {
  public:
    VulkanError(VkResult result, std::string call, const std::string& detail = "");

    const VkResult result;
    const std::string call;
};

/// "VK_ERROR_DEVICE_LOST" and so on; the number in text for a result not in the table.
std::string result_name(VkResult result);

/// The inverse of result_name; throws std::invalid_argument for an unknown name.
VkResult result_from_name(const std::string& name);

}  // namespace vkmoe
