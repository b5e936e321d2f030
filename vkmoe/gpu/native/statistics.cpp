#include "statistics.hpp"

#include "ledger.hpp"

namespace vkmoe {

namespace {

/// A function of the extension, called with checks under its name.
template <class Function>
class Call {
  public:
    Call(VkDevice device, const char* name)
        : device_(device),
          name_(name),
          function_(reinterpret_cast<Function>(vkGetDeviceProcAddr(device, name))) {}

    /// Everything it lists of `subject`, in structures of this type.
    template <class Item, class Subject>
    std::vector<Item> list(const Subject& subject, VkStructureType type) const {
        uint32_t n = 0;
        checked(name_, function_, device_, &subject, &n, static_cast<Item*>(nullptr));
        Item empty{};
        empty.sType = type;
        std::vector<Item> items(n, empty);
        checked(name_, function_, device_, &subject, &n, items.data());
        items.resize(n);
        return items;
    }
    /// Fills items that were listed before.
    template <class Item, class Subject>
    void fill(const Subject& subject, std::vector<Item>& items) const {
        auto n = static_cast<uint32_t>(items.size());
        checked(name_, function_, device_, &subject, &n, items.data());
    }

  private:
    VkDevice device_;
    const char* name_;
    Function function_;
};

double number(const VkPipelineExecutableStatisticKHR& statistic) {
    switch (statistic.format) {
        case VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_BOOL32_KHR:
            return statistic.value.b32;
        case VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_INT64_KHR:
            return static_cast<double>(statistic.value.i64);
        case VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_FLOAT64_KHR:
            return statistic.value.f64;
        default:
            return static_cast<double>(statistic.value.u64);
    }
}

std::map<std::string, double> read_statistics(VkDevice device,
                                              const VkPipelineExecutableInfoKHR& which) {
    const Call<PFN_vkGetPipelineExecutableStatisticsKHR> call(
        device, "vkGetPipelineExecutableStatisticsKHR");
    std::map<std::string, double> numbers;
    for (const auto& statistic : call.list<VkPipelineExecutableStatisticKHR>(
             which, VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR)) {
        numbers[statistic.name] = number(statistic);
    }
    return numbers;
}

std::map<std::string, std::string> read_texts(VkDevice device,
                                              const VkPipelineExecutableInfoKHR& which) {
    const Call<PFN_vkGetPipelineExecutableInternalRepresentationsKHR> call(
        device, "vkGetPipelineExecutableInternalRepresentationsKHR");
    auto stages = call.list<VkPipelineExecutableInternalRepresentationKHR>(
        which, VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INTERNAL_REPRESENTATION_KHR);
    std::vector<std::string> contents;
    for (const auto& stage : stages) contents.emplace_back(stage.dataSize, '\0');
    for (size_t i = 0; i < stages.size(); ++i) stages[i].pData = contents[i].data();
    call.fill(which, stages);
    std::map<std::string, std::string> texts;
    for (size_t i = 0; i < stages.size(); ++i) {
        if (stages[i].isText) texts[stages[i].name] = contents[i].c_str();
    }
    return texts;
}

}  // namespace

VkPipelineCreateFlags statistics_flags(bool texts) {
    VkPipelineCreateFlags flags = VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR;
    if (texts) flags |= VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR;
    return flags;
}

std::vector<Executable> read_executables(VkDevice device, VkPipeline pipeline, bool texts) {
    VkPipelineInfoKHR whole{};
    whole.sType = VK_STRUCTURE_TYPE_PIPELINE_INFO_KHR;
    whole.pipeline = pipeline;
    const Call<PFN_vkGetPipelineExecutablePropertiesKHR> call(
        device, "vkGetPipelineExecutablePropertiesKHR");
    VkPipelineExecutableInfoKHR which{};
    which.sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR;
    which.pipeline = pipeline;
    std::vector<Executable> executables;
    for (const auto& properties : call.list<VkPipelineExecutablePropertiesKHR>(
             whole, VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_PROPERTIES_KHR)) {
        Executable executable{properties.name, properties.subgroupSize, {}, {}};
        executable.statistics = read_statistics(device, which);
        if (texts) executable.texts = read_texts(device, which);
        executables.push_back(std::move(executable));
        ++which.executableIndex;
    }
    return executables;
}

std::runtime_error no_statistics(const std::string& kernel) {
    return std::runtime_error("kernel \"" + kernel +
                              "\": the device was opened without pipeline_statistics");
}

}  // namespace vkmoe
