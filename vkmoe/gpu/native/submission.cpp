#include "submission.hpp"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include <pybind11/pybind11.h>

namespace py = pybind11;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

namespace vkmoe {

namespace {

constexpr milliseconds kSlice{100};       // Ctrl-C is answered this quickly
constexpr milliseconds kMaxExpected{20};  // longer ones may as well block: 1-2 ms do not matter
constexpr nanoseconds kMinSleep{200'000};  // a shorter sleep may take twice as long as asked for

}  // namespace

Submission::Fence::Fence(std::shared_ptr<Context> device_context)
    : context(std::move(device_context)), handle(context->fences().acquire(context->device())) {}

Submission::Fence::~Fence() { context->fences().give_back(context->device(), std::move(handle)); }

Submission::Submission(std::shared_ptr<Context> context, Recordings recordings)
    : recordings_(std::move(recordings)) {
    fence_ = std::make_shared<Fence>(std::move(context));
}

void Submission::start_flights() {
    size_t n_started = 0;
    try {
        for (; n_started < recordings_.size(); ++n_started) recordings_[n_started]->start_flight();
    } catch (...) {
        while (n_started-- > 0) recordings_[n_started]->end_flight(false);
        recordings_.clear();
        throw;
    }
}

void Submission::release() noexcept {
    finish(finished_);
    fence_.reset();
}

void Submission::finish(bool succeeded) noexcept {
    const std::lock_guard lock(mutex_);
    if (recordings_.empty()) return;
    if (succeeded) {  // before the next submit can reset them
        const auto first = recordings_.front()->interval();
        const auto last = recordings_.size() == 1 ? first : recordings_.back()->interval();
        if (first && last && first->first <= last->second) interval_ = {first->first, last->second};
    }
    for (const auto& recording : recordings_) recording->end_flight(succeeded);
    recordings_.clear();
    finished_ = succeeded;  // last: who sees it may release what is used above
}

std::shared_ptr<Submission::Fence> Submission::held_fence() const {
    if (!fence_) throw std::runtime_error("the submission's device is closed");
    return fence_;
}

/// True on success, false while not done; throws what else a fence can say.
bool Submission::settle(const Fence& fence, const char* call, VkResult result) {
    if (result == VK_TIMEOUT || result == VK_NOT_READY) return false;
    if (result != VK_SUCCESS) throw VulkanError(fence.context->note(result), call);
    finish(true);
    return true;
}

bool Submission::ask(const Fence& fence) {
    fence.context->require_alive("vkGetFenceStatus");
    return settle(fence, "vkGetFenceStatus",
                  VKMOE_ATTEMPT(vkGetFenceStatus, fence.context->device(), fence.handle.get()));
}

bool Submission::wait_slice(const Fence& fence, nanoseconds limit) {
    fence.context->require_alive("vkWaitForFences");
    const VkFence handle = fence.handle.get();
    return settle(fence, "vkWaitForFences",
                  VKMOE_ATTEMPT(vkWaitForFences, fence.context->device(), 1u, &handle,
                                VkBool32{VK_TRUE}, static_cast<uint64_t>(limit.count())));
}

std::optional<Interval> Submission::interval() {
    if (!finished_) throw std::runtime_error("the submit has not been seen to finish");
    const std::lock_guard lock(mutex_);
    return interval_;
}

bool Submission::done() { return finished_ || ask(*held_fence()); }

bool Submission::poll(const Fence& fence, Clock::time_point sleep_until,
                      Clock::time_point give_up) {
    std::this_thread::sleep_until(std::min(sleep_until, give_up));
    do {
        if (ask(fence)) return true;
        std::this_thread::yield();
    } while (Clock::now() < give_up);
    return false;
}

bool Submission::wait(uint64_t expected_ns, uint64_t timeout_ns) {
    if (finished_) return true;
    const auto fence = held_fence();
    const auto limit = nanoseconds(std::min<uint64_t>(timeout_ns, INT64_MAX / 4));
    const auto deadline = timeout_ns == 0 ? Clock::time_point::max() : Clock::now() + limit;
    const nanoseconds expected(std::min<uint64_t>(expected_ns, INT64_MAX / 4));
    if (expected.count() > 0 && expected < kMaxExpected) {
        const py::gil_scoped_release no_gil;
        const auto give_up = submitted_at_ + 2 * expected + milliseconds(1);
        const auto sleep = expected * 4 / 5;
        const auto sleep_until = submitted_at_ + (sleep < kMinSleep ? nanoseconds(0) : sleep);
        if (poll(*fence, sleep_until, std::min(give_up, deadline))) return true;
    }
    while (true) {
        const auto left = std::max(deadline - Clock::now(), Clock::duration::zero());
        {
            const py::gil_scoped_release no_gil;
            if (wait_slice(*fence, std::min<nanoseconds>(kSlice, left))) return true;
        }
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (Clock::now() >= deadline) return false;
    }
}

bool Submission::join(Clock::duration limit) noexcept {
    const auto fence = fence_;  // another thread may close the device during the wait
    if (finished_ || !fence) return true;
    const VkFence handle = fence->handle.get();
    const auto wait_ns = std::chrono::duration_cast<nanoseconds>(limit).count();
    const py::gil_scoped_release no_gil;
    const VkResult result = vkWaitForFences(fence->context->device(), 1, &handle, VK_TRUE,
                                            static_cast<uint64_t>(std::max<int64_t>(wait_ns, 0)));
    if (result == VK_SUCCESS) finish(!fence->context->lost());
    // A lost device has nothing in flight any more: its objects may be destroyed.
    return result == VK_SUCCESS || result == VK_ERROR_DEVICE_LOST;
}

}  // namespace vkmoe
