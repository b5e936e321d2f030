#include "device.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace vkmoe {

namespace {

constexpr std::chrono::seconds kJoinLimit{5};

// Never destroyed, like the ledger. Guarded by the GIL.
std::set<Device*>& open_devices() {
    static auto* const devices = new std::set<Device*>;
    return *devices;
}

}  // namespace

Device::Device(std::shared_ptr<Context> context) : context_(std::move(context)) {
    open_devices().insert(this);
}

Device::~Device() {
    open_devices().erase(this);
    if (!context_) return;
    if (join(kJoinLimit)) {
        release_all();
    } else {
        // The driver still uses these objects: leaking them is the lesser evil.
        new std::vector<std::shared_ptr<Submission>>(std::move(in_flight_));
    }
}

Context& Device::context() const {
    if (!context_) throw std::runtime_error("the device is closed");
    return *context_;
}

template <class Made>
std::shared_ptr<Made> Device::keep(std::shared_ptr<Made> made) {
    if (children_.size() >= prune_at_) {
        const auto dead = [](const std::weak_ptr<Resource>& child) { return child.expired(); };
        children_.erase(std::remove_if(children_.begin(), children_.end(), dead), children_.end());
        prune_at_ = std::max<size_t>(64, 2 * children_.size());
    }
    children_.push_back(made);
    return made;
}

std::shared_ptr<Buffer> Device::buffer(uint64_t size, uint32_t memory_type,
                                       const std::string& name) {
    context();
    return keep(std::make_shared<Buffer>(context_, size, memory_type, name));
}

std::shared_ptr<Tensor> Device::tensor(uint64_t n_words, const std::string& name) {
    context();
    return keep(std::make_shared<Tensor>(context_, n_words, name));
}

std::shared_ptr<Kernel> Device::kernel(const std::string& spirv,
                                       std::vector<std::shared_ptr<Tensor>> tensors,
                                       const std::vector<uint32_t>& spec, uint32_t push_bytes,
                                       const std::string& name) {
    context();
    if (tensors.empty()) {
        // kp::Algorithm builds nothing without a tensor.
        if (!placeholder_) placeholder_ = tensor(1, "placeholder");
        tensors.push_back(placeholder_);
    }
    auto context = context_;
    std::shared_ptr<Kernel> made;
    {
        const py::gil_scoped_release no_gil;  // compiling takes up to seconds; threads may share it
        made = std::make_shared<Kernel>(std::move(context), spirv, std::move(tensors), spec,
                                        push_bytes, name);
    }
    this->context();  // may have been closed meanwhile: then the kernel goes again
    return keep(std::move(made));
}

Recorder Device::recorder(uint32_t n_timestamps, const std::string& queue) {
    context();
    return Recorder(keep(std::make_shared<Recording>(context_, queue, n_timestamps)));
}

std::shared_ptr<Submission> Device::submit(const std::shared_ptr<Recording>& recording,
                                           const std::string& queue_name) {
    context().require_alive("vkQueueSubmit");
    reap();
    Queue& queue = context().queue(queue_name);
    if (queue.family != recording->queue().family) {
        throw std::invalid_argument("the recording was not made for the " + queue_name + " queue");
    }
    const VkCommandBuffer commands = recording->commands();
    auto submission = keep(std::make_shared<Submission>(context_, recording));
    recording->start_flight();
    VkSubmitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
    info.commandBufferCount = 1;
    info.pCommandBuffers = &commands;
    VkResult result;
    {
        const py::gil_scoped_release no_gil;  // before the lock: its holder may want the GIL
        const std::lock_guard lock(queue.mutex);
        result = VKMOE_ATTEMPT(vkQueueSubmit, queue.handle, 1u, &info, submission->fence());
    }
    if (result != VK_SUCCESS) {
        submission->release();
        throw VulkanError(context().note(result), "vkQueueSubmit");
    }
    submission->started();
    in_flight_.push_back(submission);
    return submission;
}

void Device::reap() {
    for (auto submission = in_flight_.begin(); submission != in_flight_.end();) {
        submission = (*submission)->done() ? in_flight_.erase(submission) : submission + 1;
    }
}

void Device::wait_idle() {
    context();
    while (!in_flight_.empty()) {
        const auto oldest = in_flight_.front();
        oldest->wait(0, 0);
        reap();
    }
}

void Device::close() {
    if (!context_) return;
    try {
        if (!context_->lost()) wait_idle();
    } catch (const VulkanError&) {
        // The device is going away; join() below waits for what the driver still has.
    }
    if (!join(kJoinLimit)) {
        throw VulkanError(VK_TIMEOUT, "vkWaitForFences", "the device does not finish its work");
    }
    release_all();
}

bool Device::join(Submission::Clock::duration limit) noexcept {
    const auto deadline = Submission::Clock::now() + limit;
    bool all = true;
    for (const auto& submission : in_flight_) {
        all = submission->join(deadline - Submission::Clock::now()) && all;
    }
    return all;
}

void Device::release_all() noexcept {
    in_flight_.clear();
    // In any order: nothing is in flight, and no object needs another's handle to go.
    for (const auto& child : children_) {
        if (const auto resource = child.lock()) resource->release();
    }
    children_.clear();
    placeholder_.reset();
    context_->upload_pools().close();
    context_.reset();
}

void join_all_devices() noexcept {
    for (Device* const device : open_devices()) device->join(kJoinLimit);
}

}  // namespace vkmoe
