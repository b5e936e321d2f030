#include "pipelines.hpp"

#include <condition_variable>
#include <map>
#include <mutex>

#include "ledger.hpp"

namespace vkmoe {

namespace {

constexpr size_t kMostUnused = 64;  // of a device

struct Shared {
    VkPipeline pipeline = VK_NULL_HANDLE;  // null: it is being made
    uint32_t n_users = 0;
    uint64_t left = 0;  // when its last user left it
};

using ByKey = std::map<PipelineKey, Shared>;
using ByHandle = std::map<std::pair<VkDevice, VkPipeline>, ByKey::iterator>;

struct Pipelines {
    std::mutex mutex;
    std::condition_variable made;
    ByKey by_key;
    ByHandle by_handle;
    uint64_t clock = 0;
};

// Never destroyed, like the ledger.
Pipelines& pipelines() {
    static auto* const instance = new Pipelines;
    return *instance;
}

}  // namespace

VkPipeline use_pipeline(const PipelineKey& key, const std::function<VkPipeline()>& make) {
    Pipelines& all = pipelines();
    std::unique_lock lock(all.mutex);
    auto [found, is_first] = all.by_key.try_emplace(key);
    while (!is_first && found->second.pipeline == VK_NULL_HANDLE) {
        all.made.wait(lock);
        std::tie(found, is_first) = all.by_key.try_emplace(key);  // who made it may have failed
    }
    if (is_first) {
        lock.unlock();
        const VkPipeline pipeline = make();
        lock.lock();
        all.made.notify_all();
        if (pipeline == VK_NULL_HANDLE) {
            all.by_key.erase(found);
            return VK_NULL_HANDLE;
        }
        found->second.pipeline = pipeline;
        all.by_handle[{key.device, pipeline}] = found;
    }
    if (found->second.n_users++ == 0) count_created("pipeline");
    return found->second.pipeline;
}

VkPipeline leave_pipeline(VkDevice device, VkPipeline pipeline) {
    Pipelines& all = pipelines();
    const std::lock_guard lock(all.mutex);
    Shared& left = all.by_handle.at({device, pipeline})->second;
    if (--left.n_users > 0) return VK_NULL_HANDLE;
    count_destroyed("pipeline");
    left.left = ++all.clock;
    size_t n_unused = 0;
    auto oldest = all.by_handle.end();
    for (auto it = all.by_handle.begin(); it != all.by_handle.end(); ++it) {
        const Shared& other = it->second->second;
        if (it->first.first != device || other.n_users > 0) continue;
        ++n_unused;
        if (oldest == all.by_handle.end() || other.left < oldest->second->second.left) oldest = it;
    }
    if (n_unused <= kMostUnused) return VK_NULL_HANDLE;
    // Out of the book before the handle can be given to another pipeline.
    const VkPipeline gone = oldest->first.second;
    all.by_key.erase(oldest->second);
    all.by_handle.erase(oldest);
    return gone;
}

std::vector<VkPipeline> forget_pipelines(VkDevice device) {
    Pipelines& all = pipelines();
    const std::lock_guard lock(all.mutex);
    std::vector<VkPipeline> found;
    for (auto it = all.by_handle.begin(); it != all.by_handle.end();) {
        if (it->first.first != device) {
            ++it;
            continue;
        }
        found.push_back(it->first.second);
        all.by_key.erase(it->second);
        it = all.by_handle.erase(it);
    }
    return found;
}

}  // namespace vkmoe
