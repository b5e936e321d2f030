// What a compiler says of a pipeline (VK_KHR_pipeline_executable_properties).
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <vulkan/vulkan.h>

namespace vkmoe {

/// One program of a pipeline, as the driver names and measures it.
struct Executable {
    std::string name;
    uint32_t subgroup_size = 0;
    std::map<std::string, double> statistics;
    std::map<std::string, std::string> texts;  // assembly and what came before it, by stage
};

/// Flags of a pipeline whose statistics, and with `texts` stages of compilation, can be read.
VkPipelineCreateFlags statistics_flags(bool texts);

/// Reads what the compiler kept; `texts`: the pipeline was made with them.
std::vector<Executable> read_executables(VkDevice device, VkPipeline pipeline, bool texts);

std::runtime_error no_statistics(const std::string& kernel);

}  // namespace vkmoe
