// A small descriptor-bound buffer in device memory: kp::Tensor of type eStorage.
#pragma once

#include <kompute/Tensor.hpp>

#include "context.hpp"
#include "storage.hpp"

namespace vkmoe {

class Tensor : public Storage {
  public:
    /// `n_words` words of 4 bytes. Throws std::invalid_argument if no descriptor could bind them.
    Tensor(std::shared_ptr<Context> context, uint64_t n_words, std::string name);
    ~Tensor() override { release(); }

    VkBuffer handle() const override { return kp()->constructDescriptorBufferInfo().buffer; }
    uint64_t n_bytes() const override { return n_words_ * 4; }
    const std::string& name() const override { return name_; }
    void release() noexcept override;

    uint64_t n_words() const { return n_words_; }
    /// Throws std::runtime_error once released.
    const std::shared_ptr<kp::Tensor>& kp() const;

  private:
    std::shared_ptr<Context> context_;
    uint64_t n_words_;
    std::string name_;
    std::shared_ptr<kp::Tensor> tensor_;
};

}  // namespace vkmoe
