// What the kernels of programs do on a CPU. Each does what the shader of its name says
// (shaders/*.comp), with ggml's products: of vectors that are rounded to 8 bits first.
#pragma once

#include <string>
#include <vector>

#include "call.hpp"
#include "pool.hpp"

namespace vkmoe {

/// Make the steps of a dispatch, of which the first does not wait. Throws std::invalid_argument for
/// a kernel that there is none of, and for what does not fit.
std::vector<Step> prepare(const std::string& kernel, const Call& call);

/// The names of all kernels.
std::vector<std::string> kernel_names();

std::vector<Step> append_latent_rows(const Call& call);
std::vector<Step> append_rows(const Call& call);
std::vector<Step> attention(const Call& call);
std::vector<Step> attention_combine(const Call& call);
std::vector<Step> candidates_merge(const Call& call);
std::vector<Step> candidates_partial(const Call& call);
std::vector<Step> combine_rows(const Call& call);
std::vector<Step> delta_inputs(const Call& call);
std::vector<Step> delta_step(const Call& call);
std::vector<Step> embed(const Call& call);
std::vector<Step> expert_down(const Call& call);
std::vector<Step> expert_gate_up(const Call& call);
std::vector<Step> expert_matmul_down(const Call& call);
std::vector<Step> expert_matmul_gate_up(const Call& call);
std::vector<Step> expert_tiles(const Call& call);
std::vector<Step> find_experts(const Call& call);
std::vector<Step> finish(const Call& call);
std::vector<Step> gate_heads(const Call& call);
std::vector<Step> gate_inputs(const Call& call);
std::vector<Step> hadamard(const Call& call);
std::vector<Step> latent_attention(const Call& call);
std::vector<Step> matmul(const Call& call);
std::vector<Step> matmul_residual(const Call& call);
std::vector<Step> matvec(const Call& call);
std::vector<Step> matvec_residual(const Call& call);
std::vector<Step> norm_residual(const Call& call);
std::vector<Step> pick_rows(const Call& call);
std::vector<Step> prompt_attention(const Call& call);
std::vector<Step> rms_norm(const Call& call);
std::vector<Step> router_topk(const Call& call);
std::vector<Step> soft_cap(const Call& call);

}  // namespace vkmoe
