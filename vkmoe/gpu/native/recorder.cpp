#include "recorder.hpp"

#include <cmath>
#include <stdexcept>

#include "kompute_calls.hpp"

namespace vkmoe {

namespace {

Owned<VkQueryPool> new_queries(VkDevice device, uint32_t n_queries) {
    VkQueryPoolCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO;
    info.queryType = VK_QUERY_TYPE_TIMESTAMP;
    info.queryCount = n_queries;
    VkQueryPool pool = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateQueryPool, device, &info, nullptr, &pool);
    return {"query_pool", pool, [=] { vkDestroyQueryPool(device, pool, nullptr); }};
}

}  // namespace

Recording::Recording(std::shared_ptr<Context> context, const std::string& queue,
                     uint32_t n_timestamps)
    : context_(std::move(context)),
      queue_(context_->queue(queue)),
      is_upload_(queue == "upload"),
      n_timestamps_(n_timestamps) {
    if (n_timestamps > 0 && !context_->has_timestamps(queue_)) {
        throw std::invalid_argument("the " + queue + " queue has no timestamps");
    }
    try {
        if (is_upload_) slot_ = context_->upload_pools().acquire(context_->device(), queue_.family);
        if (n_timestamps > 0) make_queries();
        const uint32_t n_resets = context_->resets_queries() ? 0 : n_timestamps;
        const auto begin = std::make_shared<BeginOp>(scope(), queries(), n_resets);
        is_upload_ ? begin_slot(begin) : begin_sequence(begin);
        commands_ = begin->commands();
    } catch (...) {
        release();
        throw;
    }
}

void Recording::make_queries() {
    const VkDevice device = context_->device();
    if (!slot_) {
        own_queries_ = new_queries(device, n_timestamps_);
        queries_ = own_queries_.get();
        return;
    }
    if (slot_->n_queries < n_timestamps_) {
        slot_->n_queries = 0;
        slot_->queries.reset();
        slot_->queries = new_queries(device, n_timestamps_);
        slot_->n_queries = n_timestamps_;
    }
    queries_ = slot_->queries.get();
}

void Recording::begin_sequence(const std::shared_ptr<BeginOp>& begin) {
    const KomputeScope scope(*context_);
    // The queue is never used: we submit ourselves. No timestamps: Kompute does not reset its own.
    sequence_ = std::make_shared<kp::Sequence>(context_->kp_physical(), context_->kp_device(),
                                               std::make_shared<vk::Queue>(queue_.handle),
                                               queue_.family, 0);
    count_created("sequence");
    sequence_->begin();
    scope.check("sequence");
    sequence_->record(begin);
}

void Recording::begin_slot(const std::shared_ptr<BeginOp>& begin) {
    VkCommandBufferBeginInfo info{};
    info.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
    VKMOE_CHECKED(vkBeginCommandBuffer, slot_->buffer.get(), &info);
    begin->record(vk::CommandBuffer(slot_->buffer.get()));
}

void Recording::record(std::shared_ptr<Operation> operation) {
    if (sequence_) {
        sequence_->record(operation);
    } else {
        operation->record(vk::CommandBuffer(commands()));
        operations_.push_back(std::move(operation));
    }
}

void Recording::end() {
    record(std::make_shared<EndOp>(scope()));
    if (sequence_) {
        const KomputeScope scope(*context_);
        sequence_->end();
        scope.check("sequence");
    } else {
        VKMOE_CHECKED(vkEndCommandBuffer, commands());
    }
}

VkCommandBuffer Recording::commands() const {
    if (commands_ == VK_NULL_HANDLE) throw std::runtime_error("the recording's device is closed");
    return commands_;
}

void Recording::start_flight() {
    commands();
    if (in_flight_.exchange(true)) throw std::runtime_error("the recording is still in flight");
    has_run_ = false;
    if (n_timestamps_ > 0 && context_->resets_queries()) {
        vkResetQueryPool(context_->device(), queries_, 0, n_timestamps_);
    }
}

void Recording::end_flight(bool succeeded) noexcept {
    has_run_ = succeeded;
    in_flight_ = false;
}

std::vector<uint64_t> Recording::timestamps() const {
    commands();
    if (!has_run_) throw std::runtime_error("no finished submit of this recording");
    if (n_timestamps_ == 0) return {};
    std::vector<uint64_t> ticks(n_timestamps_);
    const VkResult result = read_ticks(ticks.data());
    if (result != VK_SUCCESS) {
        throw VulkanError(context_->note(result), "vkGetQueryPoolResults",
                          result == VK_NOT_READY ? "a timestamp was not recorded" : "");
    }
    for (auto& tick : ticks) tick = nanoseconds(tick);
    return ticks;
}

std::optional<Interval> Recording::interval() const noexcept {
    uint64_t ticks[2] = {0, 0};
    if (n_timestamps_ != 2 || !context_ || read_ticks(ticks) != VK_SUCCESS) return std::nullopt;
    const Interval interval(nanoseconds(ticks[0]), nanoseconds(ticks[1]));
    if (interval.second < interval.first) return std::nullopt;  // the counter overflowed
    return interval;
}

VkResult Recording::read_ticks(uint64_t* ticks) const {
    return VKMOE_ATTEMPT(vkGetQueryPoolResults, context_->device(), queries(), 0u, n_timestamps_,
                         n_timestamps_ * sizeof(uint64_t), ticks, sizeof(uint64_t),
                         VkQueryResultFlags{VK_QUERY_RESULT_64_BIT});
}

uint64_t Recording::nanoseconds(uint64_t tick) const {
    const uint64_t mask =
        queue_.timestamp_bits >= 64 ? UINT64_MAX : (uint64_t{1} << queue_.timestamp_bits) - 1;
    const long double period = context_->properties().limits.timestampPeriod;
    return static_cast<uint64_t>(std::llround((tick & mask) * period));
}

void Recording::release() noexcept {
    commands_ = VK_NULL_HANDLE;
    if (sequence_) {
        sequence_.reset();
        count_destroyed("sequence");
    }
    operations_.clear();
    if (slot_) context_->upload_pools().give_back(std::move(slot_));
    queries_ = VK_NULL_HANDLE;
    own_queries_.reset();
    context_.reset();
}

void Copy::require_sound() const {
    source->require_range(source_offset, size);
    target->require_range(target_offset, size);
    const bool apart =
        source_offset + size <= target_offset || target_offset + size <= source_offset;
    if (source->handle() == target->handle() && !apart) {
        throw std::invalid_argument("copy within \"" + source->name() + "\" overlaps itself");
    }
}

Recording& Recorder::recording() const {
    if (!recording_) throw std::runtime_error("the recorder is finished");
    return *recording_;
}

void Recorder::dispatch(std::shared_ptr<Kernel> kernel, std::array<uint32_t, 3> groups,
                        std::string push) {
    Recording& target = recording();
    if (!target.queue().has_compute) {
        throw std::invalid_argument("the upload queue of this device cannot dispatch");
    }
    kernel->require_dispatch(groups, push);
    target.record(std::make_shared<DispatchOp>(std::move(kernel), groups, std::move(push)));
}

void Recorder::barrier() { recording().record(std::make_shared<BarrierOp>(recording().scope())); }

void Recorder::copy(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) copy.require_sound();
    Recording& recording = this->recording();
    for (auto next = copies.begin(); next != copies.end();) {
        const auto first = next;
        std::vector<VkBufferCopy> regions;
        do {
            regions.push_back({next->source_offset, next->target_offset, next->size});
        } while (++next != copies.end() && next->source == first->source &&
                 next->target == first->target && first->source != first->target);
        recording.record(std::make_shared<CopyOp>(first->source, first->target,
                                                  std::move(regions)));
    }
}

void Recorder::fill(std::shared_ptr<Storage> target, uint64_t offset, uint64_t size,
                    uint32_t word) {
    target->require_range(offset, size);
    if (offset % 4 != 0 || size % 4 != 0) {
        throw std::invalid_argument("fill of \"" + target->name() + "\" is not in whole words");
    }
    recording().record(std::make_shared<FillOp>(std::move(target), offset, size, word));
}

void Recorder::timestamp(uint32_t index) {
    if (index >= recording().n_timestamps()) {
        throw std::invalid_argument("timestamp " + std::to_string(index) + " of " +
                                    std::to_string(recording().n_timestamps()));
    }
    recording().record(std::make_shared<TimestampOp>(recording().queries(), index));
}

std::shared_ptr<Recording> Recorder::finish() {
    recording().end();
    return std::move(recording_);
}

}  // namespace vkmoe
