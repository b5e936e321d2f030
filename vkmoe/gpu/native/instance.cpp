#include "instance.hpp"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "features.hpp"

namespace vkmoe {

namespace {

constexpr const char* kLayer = "VK_LAYER_KHRONOS_validation";
constexpr const char* kPortability = "VK_KHR_portability_enumeration";

// VK_EXT_layer_settings, spelled out: it came in October 2023, and an extension that was built with
// older headers also runs with newer layers.
constexpr const char* kLayerSettings = "VK_EXT_layer_settings";
struct LayerSetting {  // VkLayerSettingEXT
    const char* layer;
    const char* name;
    int32_t type;  // VkLayerSettingTypeEXT
    uint32_t n_values;
    const void* values;
};
struct LayerSettings {  // VkLayerSettingsCreateInfoEXT
    VkStructureType sType;
    const void* pNext;
    uint32_t n_settings;
    const LayerSetting* settings;
};
constexpr auto kLayerSettingsType = static_cast<VkStructureType>(1000496000);
constexpr int32_t kLayerSettingBool32 = 0;

// Layers since July 2024 look at what shaders read and write only if they are asked to. Layers that
// do not know a setting ignore it.
constexpr VkBool32 kOn = VK_TRUE;
constexpr LayerSetting kSynchronization[] = {
    {kLayer, "validate_sync", kLayerSettingBool32, 1, &kOn},
    {kLayer, "syncval_shader_accesses_heuristic", kLayerSettingBool32, 1, &kOn},
};

VKAPI_ATTR VkBool32 VKAPI_CALL on_message(VkDebugUtilsMessageSeverityFlagBitsEXT,
                                          VkDebugUtilsMessageTypeFlagsEXT,
                                          const VkDebugUtilsMessengerCallbackDataEXT* data,
                                          void* log) {
    // Layers of 2025 leave the name of the rule out of the text.
    std::string text = data->pMessage;
    const std::string rule = data->pMessageIdName != nullptr ? data->pMessageIdName : "";
    if (text.find(rule) == std::string::npos) text = rule + ": " + text;
    static_cast<MessageLog*>(log)->add(std::move(text));
    return VK_FALSE;
}

VkDebugUtilsMessengerCreateInfoEXT messenger_info(MessageLog* log) {
    VkDebugUtilsMessengerCreateInfoEXT info{};
    info.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT;
    info.messageSeverity = VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT |
                           VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
    // General messages are the loader's chatter about drivers; they say nothing about our calls.
    info.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
    info.pfnUserCallback = on_message;
    info.pUserData = log;
    return info;
}

/// Names of the instance extensions of the loader and its drivers, or of a layer.
std::vector<std::string> instance_extensions(const char* layer) {
    uint32_t n = 0;
    VKMOE_CHECKED(vkEnumerateInstanceExtensionProperties, layer, &n, nullptr);
    std::vector<VkExtensionProperties> properties(n);
    VKMOE_CHECKED(vkEnumerateInstanceExtensionProperties, layer, &n, properties.data());
    std::vector<std::string> names;
    for (const auto& property : properties) names.emplace_back(property.extensionName);
    return names;
}

bool has_layer() {
    uint32_t n = 0;
    VKMOE_CHECKED(vkEnumerateInstanceLayerProperties, &n, nullptr);
    std::vector<VkLayerProperties> layers(n);
    VKMOE_CHECKED(vkEnumerateInstanceLayerProperties, &n, layers.data());
    return std::any_of(layers.begin(), layers.end(), [](const VkLayerProperties& layer) {
        return std::string(layer.layerName) == kLayer;
    });
}

template <class Function>
Function load(VkInstance instance, const char* name) {
    return reinterpret_cast<Function>(vkGetInstanceProcAddr(instance, name));
}

}  // namespace

void MessageLog::add(std::string text) {
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(text));
}

std::vector<std::string> MessageLog::drain() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> drained;
    drained.swap(messages_);
    return drained;
}

Instance::Instance(bool validation) {
    VkApplicationInfo application{};
    application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    application.pApplicationName = "vkmoe";
    application.apiVersion = VK_API_VERSION_1_3;

    VkInstanceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    info.pApplicationInfo = &application;
    std::vector<const char*> extensions;
    if (contains(instance_extensions(nullptr), kPortability)) {
        extensions.push_back(kPortability);  // without it MoltenVK is not listed
        info.flags |= VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR;
    }

    const VkValidationFeatureEnableEXT synchronization =
        VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT;
    VkValidationFeaturesEXT features{};
    LayerSettings settings{};
    VkDebugUtilsMessengerCreateInfoEXT messenger{};
    if (validation) {
        if (!has_layer()) {
            throw VulkanError(VK_ERROR_LAYER_NOT_PRESENT, "vkCreateInstance", kLayer);
        }
        messages_ = std::make_unique<MessageLog>();
        messenger = messenger_info(messages_.get());
        info.pNext = &messenger;
        // One of the two switches synchronisation validation on; which one depends on the layer's
        // age. vkmoe/gpu/device.py checks that it is on.
        const auto offered = instance_extensions(kLayer);
        if (contains(offered, VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME)) {
            features.sType = VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT;
            features.pNext = info.pNext;
            features.enabledValidationFeatureCount = 1;
            features.pEnabledValidationFeatures = &synchronization;
            info.pNext = &features;
            extensions.push_back(VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME);
        }
        if (contains(offered, kLayerSettings)) {
            settings = {kLayerSettingsType, info.pNext, std::size(kSynchronization),
                        kSynchronization};
            info.pNext = &settings;
            extensions.push_back(kLayerSettings);
        }
        info.enabledLayerCount = 1;
        info.ppEnabledLayerNames = &kLayer;
        extensions.push_back(VK_EXT_DEBUG_UTILS_EXTENSION_NAME);
    }
    info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
    info.ppEnabledExtensionNames = extensions.data();

    VkInstance handle = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateInstance, &info, nullptr, &handle);
    instance_ = {"instance", handle, [handle] { vkDestroyInstance(handle, nullptr); }};
    if (!validation) return;

    const auto create =
        load<PFN_vkCreateDebugUtilsMessengerEXT>(handle, "vkCreateDebugUtilsMessengerEXT");
    const auto destroy =
        load<PFN_vkDestroyDebugUtilsMessengerEXT>(handle, "vkDestroyDebugUtilsMessengerEXT");
    set_name_ = load<PFN_vkSetDebugUtilsObjectNameEXT>(handle, "vkSetDebugUtilsObjectNameEXT");
    VkDebugUtilsMessengerEXT created = VK_NULL_HANDLE;
    checked("vkCreateDebugUtilsMessengerEXT", create, handle, &messenger, nullptr, &created);
    messenger_ = {"messenger", created,
                  [handle, destroy, created] { destroy(handle, created, nullptr); }};
}

std::vector<std::string> Instance::messages() const {
    return messages_ ? messages_->drain() : std::vector<std::string>{};
}

std::vector<VkPhysicalDevice> Instance::physical_devices() const {
    uint32_t n = 0;
    VKMOE_CHECKED(vkEnumeratePhysicalDevices, handle(), &n, nullptr);
    std::vector<VkPhysicalDevice> devices(n);
    VKMOE_CHECKED(vkEnumeratePhysicalDevices, handle(), &n, devices.data());
    return devices;
}

VkPhysicalDevice Instance::physical_device(size_t index) const {
    const auto devices = physical_devices();
    if (index >= devices.size()) {
        throw std::out_of_range("no physical device " + std::to_string(index) + ", there are " +
                                std::to_string(devices.size()));
    }
    return devices[index];
}

void Instance::name_object(VkDevice device, VkObjectType type, uint64_t handle,
                           const std::string& name) const {
    if (set_name_ == nullptr || name.empty()) return;
    VkDebugUtilsObjectNameInfoEXT info{};
    info.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_OBJECT_NAME_INFO_EXT;
    info.objectType = type;
    info.objectHandle = handle;
    info.pObjectName = name.c_str();
    set_name_(device, &info);  // a missing name is no reason to fail
}

}  // namespace vkmoe
