#include "handshake.hpp"

#include <stdexcept>
#include <thread>

#include <pybind11/pybind11.h>

namespace py = pybind11;
using std::chrono::microseconds;

namespace vkmoe {

namespace {

constexpr microseconds kPolling{500};        // before the thread sleeps, which costs 50 us or more
constexpr uint64_t kSliceNs = 100'000'000;  // Ctrl-C is answered this quickly

Owned<VkSemaphore> new_timeline(VkDevice device) {
    VkSemaphoreTypeCreateInfo type{};
    type.sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO;
    type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
    VkSemaphoreCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO;
    info.pNext = &type;
    VkSemaphore semaphore = VK_NULL_HANDLE;
    VKMOE_CHECKED(vkCreateSemaphore, device, &info, nullptr, &semaphore);
    return {"semaphore", semaphore, [=] { vkDestroySemaphore(device, semaphore, nullptr); }};
}

bool has_reached(Context& context, VkSemaphore semaphore, uint64_t number) {
    context.require_alive("vkGetSemaphoreCounterValue");
    uint64_t value = 0;
    const VkResult result =
        VKMOE_ATTEMPT(vkGetSemaphoreCounterValue, context.device(), semaphore, &value);
    if (result != VK_SUCCESS) throw VulkanError(context.note(result), "vkGetSemaphoreCounterValue");
    return value >= number;
}

VkResult signal(Context& context, VkSemaphore semaphore, uint64_t turn) {
    VkSemaphoreSignalInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO;
    info.semaphore = semaphore;
    info.value = turn;
    return VKMOE_ATTEMPT(vkSignalSemaphore, context.device(), &info);
}

}  // namespace

Handshake::Handshake(std::shared_ptr<Context> context) {
    auto ended = new_timeline(context->device()), answered = new_timeline(context->device());
    held_ = std::make_shared<Held>(Held{std::move(context), std::move(ended), std::move(answered)});
}

void Handshake::release() noexcept { held_.reset(); }

std::shared_ptr<Handshake::Held> Handshake::held() const {
    if (!held_) throw std::runtime_error("the handshake's device is closed");
    return held_;
}

std::vector<Handshake::Turn> Handshake::begin(const std::vector<bool>& waits,
                                              const std::vector<bool>& asks) {
    held();
    if (answered_ != last_) throw std::runtime_error("the last chain is not answered");
    if (waits.size() != asks.size()) throw std::invalid_argument("a chain of two lengths");
    std::vector<Turn> turns(waits.size());
    asking_.clear();
    for (size_t i = 0; i < turns.size(); ++i) {
        if (waits[i]) turns[i].answered = last_ + asking_.size();
        turns[i].ended = ++n_submits_;
        if (asks[i]) asking_.push_back(n_submits_);
    }
    last_ += asking_.size();
    return turns;
}

void Handshake::wait() {
    const auto held = this->held();
    if (answered_ == last_) throw std::runtime_error("no submit asks for anything more");
    Context& context = *held->context;
    const uint64_t turn = answered_ + 1;  // another thread may let go meanwhile
    const uint64_t submit = asking_[asking_.size() - (last_ - answered_)];
    const VkSemaphore semaphore = held->ended.get();
    {
        const py::gil_scoped_release no_gil;
        const auto give_up = Clock::now() + kPolling;
        do {
            if (has_reached(context, semaphore, submit)) return;
            std::this_thread::yield();
        } while (Clock::now() < give_up);
    }
    VkSemaphoreWaitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO;
    info.semaphoreCount = 1;
    info.pSemaphores = &semaphore;
    info.pValues = &submit;
    while (true) {
        if (answered_ >= turn) throw std::runtime_error("the chain was let go");
        context.require_alive("vkWaitSemaphores");
        VkResult result;
        {
            const py::gil_scoped_release no_gil;
            result = VKMOE_ATTEMPT(vkWaitSemaphores, context.device(), &info, kSliceNs);
        }
        if (result == VK_SUCCESS) return;
        if (result != VK_TIMEOUT) throw VulkanError(context.note(result), "vkWaitSemaphores");
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

void Handshake::answer() {
    const auto held = this->held();
    if (answered_ == last_) throw std::runtime_error("no submit asks for anything more");
    Context& context = *held->context;
    const VkResult result = signal(context, held->answered.get(), answered_ + 1);
    if (result != VK_SUCCESS) throw VulkanError(context.note(result), "vkSignalSemaphore");
    ++answered_;
}

void Handshake::let_go() noexcept {
    if (!held_ || answered_ == last_) return;
    signal(*held_->context, held_->answered.get(), last_);  // where it fails the device is lost
    answered_ = last_;
}

}  // namespace vkmoe
