// What a device hands out: things it can release, and things that commands read and write.
#pragma once

#include <cstdint>
#include <string>

#include <vulkan/vulkan.h>

namespace vkmoe {

/// Owns Vulkan objects; Device::close releases them even while Python still holds this.
class Resource {
  public:
    virtual ~Resource() = default;
    virtual void release() noexcept = 0;
};

/// A buffer as copy and fill see it.
class Storage : public Resource {
  public:
    /// Throws std::runtime_error once released.
    virtual VkBuffer handle() const = 0;
    virtual uint64_t n_bytes() const = 0;
    virtual const std::string& name() const = 0;

    /// Throws std::invalid_argument unless [offset, offset + size) lies inside and is not empty.
    void require_range(uint64_t offset, uint64_t size) const;
};

}  // namespace vkmoe
