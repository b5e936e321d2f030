// The Vulkan instance, its validation messages, and the physical devices behind it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ledger.hpp"

namespace vkmoe {

/// Validation messages, collected from any thread.
class MessageLog {
  public:
    void add(std::string text);
    std::vector<std::string> drain();

  private:
    std::mutex mutex_;
    std::vector<std::string> messages_;
};

/// VkInstance, with the Khronos layer and synchronisation validation if asked.
/// Devices hold it alive; the handle is destroyed with the last of them.
class Instance {
  public:
    explicit Instance(bool validation);

    VkInstance handle() const { return instance_.get(); }
    bool validating() const { return messages_ != nullptr; }
    std::vector<std::string> messages() const;
    std::vector<VkPhysicalDevice> physical_devices() const;
    /// Throws std::out_of_range if there is no such device.
    VkPhysicalDevice physical_device(size_t index) const;
    /// Gives a handle a name in validation messages; does nothing without validation.
    void name_object(VkDevice device, VkObjectType type, uint64_t handle,
                     const std::string& name) const;

  private:
    std::unique_ptr<MessageLog> messages_;  // outlives the instance: callbacks write to it
    Owned<VkInstance> instance_;
    Owned<VkDebugUtilsMessengerEXT> messenger_;
    PFN_vkSetDebugUtilsObjectNameEXT set_name_ = nullptr;
};

}  // namespace vkmoe
