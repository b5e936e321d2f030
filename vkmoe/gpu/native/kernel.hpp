// A compute pipeline, which others may share, with its bound tensors: kp::Algorithm.
#pragma once

#include <array>
#include <vector>

#include <kompute/Algorithm.hpp>

#include "statistics.hpp"
#include "tensor.hpp"

namespace vkmoe {

class Kernel : public Resource {
  public:
    /// `spirv`: a whole module, entry point "main"; `tensors` are bindings 0, 1, ... of set 0
    /// (at least one); `spec`: specialisation constants 0, 1, ...; `push_bytes`: multiple of 4;
    /// `subgroup_size`: workgroups are whole subgroups of this size; 0: the driver's choice;
    /// `texts`: the compiler keeps its texts too, where the device has statistics.
    Kernel(std::shared_ptr<Context> context, const std::string& spirv,
           std::vector<std::shared_ptr<Tensor>> tensors, const std::vector<uint32_t>& spec,
           uint32_t push_bytes, std::string name, uint32_t subgroup_size, bool texts);
    ~Kernel() override { release(); }

    const std::string& name() const { return name_; }
    void release() noexcept override;

    /// Throws std::invalid_argument if groups or push constants do not fit this kernel.
    void require_dispatch(const std::array<uint32_t, 3>& groups, const std::string& push) const;
    void record(VkCommandBuffer commands, const std::array<uint32_t, 3>& groups,
                const std::string& push);
    /// What the compiler made of it. Throws std::runtime_error on a device without statistics.
    std::vector<Executable> executables() const;

  private:
    std::shared_ptr<Context> context_;
    std::vector<std::shared_ptr<Tensor>> tensors_;  // alive as long as the descriptors
    uint32_t push_bytes_;
    std::string name_;
    bool texts_;
    std::shared_ptr<kp::Algorithm> algorithm_;
    VkPipeline pipeline_ = VK_NULL_HANDLE;  // of the algorithm, shared (pipelines.hpp)
};

}  // namespace vkmoe
