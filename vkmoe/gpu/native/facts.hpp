// What a physical device is, as plain Python data.
#pragma once

#include <pybind11/pybind11.h>

#include <vulkan/vulkan.h>

namespace vkmoe {

/// The dict that Instance.physical_devices() lists; its keys are in _native.pyi.
pybind11::dict device_facts(VkInstance instance, VkPhysicalDevice physical, uint32_t index);

/// Its list of heaps, as they are now. Must hold: the device knows Vulkan 1.1.
pybind11::list heap_facts(VkPhysicalDevice physical);

}  // namespace vkmoe
