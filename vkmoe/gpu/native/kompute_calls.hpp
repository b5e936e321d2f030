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
#include "pipelines.hpp"

namespace vkmoe {

/// Encloses a piece of work done by Kompute on this thread.
class KomputeScope {
  public:
    /// `key`: of the one pipeline that it makes, if it makes any; outlives the scope.
    explicit KomputeScope(Context& context, const PipelineKey* key = nullptr);
    ~KomputeScope();
    KomputeScope(const KomputeScope&) = delete;
    KomputeScope& operator=(const KomputeScope&) = delete;

    /// Throws the first failure of the scope, if there was one.
    void check(const std::string& detail = "") const;

    static KomputeScope* current();
    const Context& context() const { return context_; }
    const PipelineKey* key() const { return key_; }
    /// The pipeline that was made; Kompute owns it and does not give it away.
    VkPipeline pipeline() const { return pipeline_; }
    void made(VkPipeline pipeline) { pipeline_ = pipeline; }
    bool failed() const { return call_ != nullptr; }
    void fail(const char* call, VkResult result);

  private:
    Context& context_;
    const PipelineKey* key_;
    VkPipeline pipeline_ = VK_NULL_HANDLE;
    const char* call_ = nullptr;
    VkResult result_ = VK_SUCCESS;
};

/// Puts our functions into the table; safe to call again.
void fill_kompute_dispatch();

}  // namespace vkmoe
