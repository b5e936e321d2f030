// The book of live Vulkan objects and of injected failures; every creating call passes here.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "errors.hpp"

namespace vkmoe {

void count_created(const char* kind);
void count_destroyed(const char* kind);

/// Live objects by kind; kinds with none are absent.
std::map<std::string, int64_t> live_objects();

/// The (after + 1)-th future `call` returns `result` instead of being made, once.
void inject_failure(const std::string& call, unsigned after, VkResult result);
void clear_injections();

/// The injected result that is due for this call, if any.
std::optional<VkResult> injected(const char* call);

/// Makes the call, or returns its injected result.
template <class Function, class... Arguments>
VkResult attempt(const char* call, Function function, Arguments... arguments) {
    if (const auto result = injected(call)) return *result;
    return function(arguments...);
}

/// Like attempt, but every result except VK_SUCCESS is a VulkanError.
template <class Function, class... Arguments>
void checked(const char* call, Function function, Arguments... arguments) {
    const VkResult result = attempt(call, function, arguments...);
    if (result != VK_SUCCESS) throw VulkanError(result, call);
}

#define VKMOE_ATTEMPT(function, ...) ::vkmoe::attempt(#function, function, __VA_ARGS__)
#define VKMOE_CHECKED(function, ...) ::vkmoe::checked(#function, function, __VA_ARGS__)

/// A Vulkan handle that is counted while it lives and destroyed once.
template <class Handle>
class Owned {
  public:
    Owned() = default;
    Owned(const char* kind, Handle handle, std::function<void()> destroy)
        : kind_(kind), handle_(handle), destroy_(std::move(destroy)) {
        count_created(kind_);
    }
    Owned(Owned&& other) noexcept { *this = std::move(other); }
    Owned& operator=(Owned&& other) noexcept {
        std::swap(kind_, other.kind_);
        std::swap(handle_, other.handle_);
        std::swap(destroy_, other.destroy_);
        return *this;
    }
    ~Owned() { reset(); }

    void reset() noexcept {
        if (handle_ == VK_NULL_HANDLE) return;
        destroy_();
        count_destroyed(kind_);
        handle_ = VK_NULL_HANDLE;
    }
    Handle get() const { return handle_; }
    explicit operator bool() const { return handle_ != VK_NULL_HANDLE; }

  private:
    const char* kind_ = "";
    Handle handle_ = VK_NULL_HANDLE;
    std::function<void()> destroy_;
};

}  // namespace vkmoe
