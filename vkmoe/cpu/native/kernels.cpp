#include "kernels.hpp"

#include <map>
#include <stdexcept>

namespace vkmoe {

namespace {

const std::map<std::string, std::vector<Step> (*)(const Call&)>& all() {
    static const std::map<std::string, std::vector<Step> (*)(const Call&)> kernels{
        {"append_latent_rows", append_latent_rows},
        {"append_rows", append_rows},
        {"attention", attention},
        {"attention_combine", attention_combine},
        {"candidates_merge", candidates_merge},
        {"candidates_partial", candidates_partial},
        {"combine_rows", combine_rows},
        {"delta_inputs", delta_inputs},
        {"delta_step", delta_step},
        {"embed", embed},
        {"expert_down", expert_down},
        {"expert_gate_up", expert_gate_up},
        {"expert_matmul_down", expert_matmul_down},
        {"expert_matmul_gate_up", expert_matmul_gate_up},
        {"expert_tiles", expert_tiles},
        {"find_experts", find_experts},
        {"finish", finish},
        {"gate_heads", gate_heads},
        {"gate_inputs", gate_inputs},
        {"hadamard", hadamard},
        {"latent_attention", latent_attention},
        {"matmul", matmul},
        {"matmul_residual", matmul_residual},
        {"matvec", matvec},
        {"matvec_residual", matvec_residual},
        {"norm_residual", norm_residual},
        {"pick_rows", pick_rows},
        {"prompt_attention", prompt_attention},
        {"rms_norm", rms_norm},
        {"router_topk", router_topk},
        {"soft_cap", soft_cap},
    };
    return kernels;
}

}  // namespace

std::vector<Step> prepare(const std::string& kernel, const Call& call) {
    const auto found = all().find(kernel);
    if (found == all().end()) throw std::invalid_argument("no kernel " + kernel + " for CPUs");
    return found->second(call);
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const auto& [name, make] : all()) names.push_back(name);
    return names;
}

}  // namespace vkmoe
