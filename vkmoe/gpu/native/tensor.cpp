#include "tensor.hpp"

#include <algorithm>
#include <stdexcept>

#include "kompute_calls.hpp"

namespace vkmoe {

Tensor::Tensor(std::shared_ptr<Context> context, uint64_t n_words, std::string name)
    : context_(std::move(context)), n_words_(n_words), name_(std::move(name)) {
    // Kompute counts bytes in 32 bits; a descriptor reaches maxStorageBufferRange bytes.
    const uint64_t max_bytes = std::min<uint64_t>(
        context_->properties().limits.maxStorageBufferRange, UINT32_MAX - 3);
    if (n_words == 0 || n_words > max_bytes / 4) {
        throw std::invalid_argument("tensor \"" + name_ + "\": " + std::to_string(n_words) +
                                    " words, must be 1 to " + std::to_string(max_bytes / 4));
    }
    const KomputeScope scope(*context_);
    tensor_ = std::make_shared<kp::Tensor>(
        context_->kp_physical(), context_->kp_device(), nullptr, static_cast<uint32_t>(n_words), 4,
        kp::Tensor::TensorDataTypes::eUnsignedInt, kp::Tensor::TensorTypes::eStorage);
    scope.check("tensor \"" + name_ + "\"");
    context_->instance().name_object(context_->device(), VK_OBJECT_TYPE_BUFFER,
                                     reinterpret_cast<uint64_t>(handle()), name_);
}

const std::shared_ptr<kp::Tensor>& Tensor::kp() const {
    if (!tensor_) throw std::runtime_error("tensor \"" + name_ + "\" is closed");
    return tensor_;
}

void Tensor::release() noexcept {
    // destroy() and not just reset(): an algorithm may hold Kompute's object for longer.
    if (tensor_) tensor_->destroy();
    tensor_.reset();
    context_.reset();
}

}  // namespace vkmoe
