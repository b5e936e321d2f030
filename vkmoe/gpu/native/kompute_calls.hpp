// Every Vulkan call that Kompute makes, checked, counted and open to injected failures.
//
// Kompute dispatches through vulkan.hpp's table of function pointers; fill_kompute_dispatch puts
// our functions there. Kompute ignores many results and its constructors leak when they throw, so
// a failure is not reported to it: the call yields a null handle and VK_SUCCESS, the KomputeScope
// remembers the first failure and makes no further calls, and check() throws it once Kompute is
// done and its destructors can run.
#pragma once

#include <optional>

#include "context.hpp"

namespace vkmoe {

/// Encloses a piece of work done by Kompute on this thread.
class KomputeScope {
  public:
    /// `subgroup_size`: what its pipelines require, in full subgroups; 0: the driver's choice.
    /// `flags`: of its pipelines.
    explicit KomputeScope(Context& context, uint32_t subgroup_size = 0,
                          VkPipelineCreateFlags flags = 0);
    ~KomputeScope();
    KomputeScope(const KomputeScope&) = delete;
    KomputeScope& operator=(const KomputeScope&) = delete;

    /// Throws the first failure of the scope, if there was one.
    void check(const std::string& detail = "") const;

    static KomputeScope* current();
    const Context& context() const { return context_; }
    uint32_t subgroup_size() const { return subgroup_size_; }
    VkPipelineCreateFlags flags() const { return flags_; }
    /// The last pipeline that was made; Kompute owns it and does not give it away.
    VkPipeline pipeline() const { return pipeline_; }
    void made(VkPipeline pipeline) { pipeline_ = pipeline; }
    bool failed() const { return call_ != nullptr; }
    void fail(const char* call, VkResult result);

  private:
    Context& context_;
    uint32_t subgroup_size_;
    VkPipelineCreateFlags flags_;
    VkPipeline pipeline_ = VK_NULL_HANDLE;
    const char* call_ = nullptr;
    VkResult result_ = VK_SUCCESS;
};

/// Puts our functions into the table; safe to call again.
void fill_kompute_dispatch();

}  // namespace vkmoe
