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

}  // namespace

Handshake::Handshake(std::shared_ptr<Context> context)
    : context_(std::move(context)),
      asked_(new_timeline(context_->device())),
      answered_semaphore_(new_timeline(context_->device())) {}

void Handshake::release() noexcept {
    asked_.reset();
    answered_semaphore_.reset();
    context_.reset();
}

VkDevice Handshake::device() const {
    if (!context_) throw std::runtime_error("the handshake's device is closed");
    return context_->device();
}

std::vector<Handshake::Turn> Handshake::begin(const std::vector<bool>& waits,
                                              const std::vector<bool>& asks) {
    device();
    if (answered_ != last_) throw std::runtime_error("the last chain is not answered");
    if (waits.size() != asks.size()) throw std::invalid_argument("a chain of two lengths");
    std::vector<Turn> turns(waits.size());
    uint64_t asked = last_;
    for (size_t i = 0; i < turns.size(); ++i) {
        if (waits[i]) turns[i].answered = asked;
        if (asks[i]) turns[i].asked = ++asked;
    }
    last_ = asked;
    return turns;
}

bool Handshake::has_asked(VkDevice device) const {
    context_->require_alive("vkGetSemaphoreCounterValue");
    uint64_t value = 0;
    const VkResult result =
        VKMOE_ATTEMPT(vkGetSemaphoreCounterValue, device, asked_.get(), &value);
    if (result != VK_SUCCESS) throw VulkanError(context_->note(result), "vkGetSemaphoreCounterValue");
    return value > answered_;
}

void Handshake::wait() {
    const VkDevice device = this->device();
    if (answered_ == last_) throw std::runtime_error("no submit asks for anything more");
    {
        const py::gil_scoped_release no_gil;
        const auto give_up = Clock::now() + kPolling;
        do {
            if (has_asked(device)) return;
            std::this_thread::yield();
        } while (Clock::now() < give_up);
    }
    const uint64_t turn = answered_ + 1;
    const VkSemaphore semaphore = asked_.get();
    VkSemaphoreWaitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO;
    info.semaphoreCount = 1;
    info.pSemaphores = &semaphore;
    info.pValues = &turn;
    while (true) {
        VkResult result;
        {
            const py::gil_scoped_release no_gil;
            result = VKMOE_ATTEMPT(vkWaitSemaphores, device, &info, kSliceNs);
        }
        if (result == VK_SUCCESS) return;
        if (result != VK_TIMEOUT) throw VulkanError(context_->note(result), "vkWaitSemaphores");
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

void Handshake::answer() {
    const VkDevice device = this->device();
    if (answered_ == last_) throw std::runtime_error("no submit asks for anything more");
    VkSemaphoreSignalInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO;
    info.semaphore = answered_semaphore_.get();
    info.value = answered_ + 1;
    const VkResult result = VKMOE_ATTEMPT(vkSignalSemaphore, device, &info);
    if (result != VK_SUCCESS) throw VulkanError(context_->note(result), "vkSignalSemaphore");
    ++answered_;
}

void Handshake::let_go() noexcept {
    if (!context_ || answered_ == last_) return;
    VkSemaphoreSignalInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO;
    info.semaphore = answered_semaphore_.get();
    info.value = last_;
    vkSignalSemaphore(context_->device(), &info);  // where it fails the device is lost
    answered_ = last_;
}

}  // namespace vkmoe
