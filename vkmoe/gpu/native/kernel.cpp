#include "kernel.hpp"

#include <cstring>
#include <stdexcept>

#include "kompute_calls.hpp"

namespace vkmoe {

namespace {

constexpr uint32_t kSpirvMagic = 0x07230203;

std::vector<uint32_t> spirv_words(const std::string& bytes, const std::string& name) {
    std::vector<uint32_t> words(bytes.size() / 4);
    std::memcpy(words.data(), bytes.data(), words.size() * 4);
    // Drivers are free to crash on anything that is not a module.
    if (bytes.size() % 4 != 0 || words.size() < 5 || words[0] != kSpirvMagic) {
        throw std::invalid_argument("kernel \"" + name + "\": not a SPIR-V module");
    }
    return words;
}

}  // namespace

Kernel::Kernel(std::shared_ptr<Context> context, const std::string& spirv,
               std::vector<std::shared_ptr<Tensor>> tensors, const std::vector<uint32_t>& spec,
               uint32_t push_bytes, std::string name, uint32_t subgroup_size, bool texts)
    : context_(std::move(context)),
      tensors_(std::move(tensors)),
      push_bytes_(push_bytes),
      name_(std::move(name)),
      texts_(texts) {
    const uint32_t max_push = context_->properties().limits.maxPushConstantsSize;
    if (push_bytes % 4 != 0 || push_bytes > max_push) {
        throw std::invalid_argument("kernel \"" + name_ + "\": " + std::to_string(push_bytes) +
                                    " bytes of push constants, not whole words up to " +
                                    std::to_string(max_push));
    }
    if (subgroup_size != 0 && !context_->takes_subgroup_size(subgroup_size)) {
        throw std::invalid_argument("kernel \"" + name_ + "\": subgroups of " +
                                    std::to_string(subgroup_size) +
                                    " cannot be required of this device as it was opened");
    }
    const auto words = spirv_words(spirv, name_);
    std::vector<std::shared_ptr<kp::Tensor>> bound;
    for (const auto& tensor : tensors_) bound.push_back(tensor->kp());

    if (texts && !context_->has_statistics()) throw no_statistics(name_);
    const VkPipelineCreateFlags flags =
        context_->has_statistics() ? statistics_flags(texts) : 0;
    const PipelineKey key{context_->device(), spirv,         spec, static_cast<uint32_t>(bound.size()),
                          push_bytes,         subgroup_size, flags};
    const KomputeScope scope(*context_, &key);
    // Built in two steps: a constructor that throws would leak what it had made.
    algorithm_ = std::make_shared<kp::Algorithm>(context_->kp_device());
    algorithm_->rebuild<uint32_t, uint32_t>(bound, words, {1, 1, 1}, spec,
                                            std::vector<uint32_t>(push_bytes / 4));
    scope.check("kernel \"" + name_ + "\"");
    pipeline_ = scope.pipeline();
}

std::vector<Executable> Kernel::executables() const {
    if (!algorithm_) throw std::runtime_error("kernel \"" + name_ + "\" is closed");
    if (!context_->has_statistics()) throw no_statistics(name_);
    return read_executables(context_->device(), pipeline_, texts_);
}

void Kernel::require_dispatch(const std::array<uint32_t, 3>& groups,
                              const std::string& push) const {
    if (!algorithm_) throw std::runtime_error("kernel \"" + name_ + "\" is closed");
    const auto& most = context_->properties().limits.maxComputeWorkGroupCount;
    for (int axis = 0; axis < 3; ++axis) {
        if (groups[axis] >= 1 && groups[axis] <= most[axis]) continue;
        throw std::invalid_argument("kernel \"" + name_ + "\": " + std::to_string(groups[axis]) +
                                    " workgroups on axis " + std::to_string(axis) +
                                    ", must be 1 to " + std::to_string(most[axis]));
    }
    if (push.size() != push_bytes_) {
        throw std::invalid_argument("kernel \"" + name_ + "\": " + std::to_string(push.size()) +
                                    " bytes of push constants, expected " +
                                    std::to_string(push_bytes_));
    }
}

void Kernel::record(VkCommandBuffer commands, const std::array<uint32_t, 3>& groups,
                    const std::string& push) {
    const vk::CommandBuffer buffer(commands);
    algorithm_->setWorkgroup({groups[0], groups[1], groups[2]});
    algorithm_->recordBindCore(buffer);
    if (push_bytes_ > 0) {
        algorithm_->setPushConstants(const_cast<char*>(push.data()), push_bytes_ / 4, 4);
        algorithm_->recordBindPush(buffer);
    }
    algorithm_->recordDispatch(buffer);
}

void Kernel::release() noexcept {
    algorithm_.reset();
    tensors_.clear();
    context_.reset();
}

}  // namespace vkmoe
