#include "device.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <thread>

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace vkmoe {

namespace {

// Never destroyed, like the ledger. Guarded by the GIL.
std::set<Device*>& open_devices() {
    static auto* const devices = new std::set<Device*>;
    return *devices;
}

/// What devices that never finished may still use: leaking it is the lesser evil.
struct Abandoned {
    std::vector<std::shared_ptr<Resource>> resources;
    std::vector<std::shared_ptr<Submission>> submissions;
};

// Never destroyed. Guarded by the GIL.
Abandoned& abandoned() {
    static auto* const leaked = new Abandoned;
    return *leaked;
}

std::chrono::nanoseconds duration(uint64_t timeout_ns) {
    return std::chrono::nanoseconds(std::min<uint64_t>(timeout_ns, INT64_MAX / 4));
}

template <class Item>
void move_to(std::vector<Item>& target, std::vector<Item>& source) {
    target.insert(target.end(), source.begin(), source.end());
    source.clear();
}

}  // namespace

Device::Device(std::shared_ptr<Context> context)
    : context_(std::move(context)), heap_bytes_(context_->heap_bytes()) {
    open_devices().insert(this);
}

Device::~Device() {
    open_devices().erase(this);
    if (!context_) return;
    join(kJoinLimit) ? release_all() : abandon();
}

Context& Device::context() const {
    if (!context_ || closing_) throw std::runtime_error("the device is closed");
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
                                       const std::string& name, uint32_t subgroup_size, bool texts) {
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
                                        push_bytes, name, subgroup_size, texts);
    }
    this->context();  // may have been closed meanwhile: then the kernel goes again
    return keep(std::move(made));
}

Recorder Device::recorder(uint32_t n_timestamps, const std::string& queue) {
    context();
    return Recorder(keep(std::make_shared<Recording>(context_, queue, n_timestamps)));
}

std::shared_ptr<Submission> Device::submit(const Recordings& recordings,
                                           const std::string& queue_name) {
    Queue& queue = context().queue(queue_name);
    if (recordings.empty()) throw std::invalid_argument("no recording to submit");
    std::vector<VkCommandBuffer> commands;
    for (const auto& recording : recordings) {
        if (queue.family != recording->queue().family) {
            throw std::invalid_argument("the recording was not made for the " + queue_name +
                                        " queue");
        }
        commands.push_back(recording->commands());
    }
    context().require_alive("vkQueueSubmit");
    reap();
    auto submission = keep(std::make_shared<Submission>(context_, recordings));
    submission->start_flights();
    VkSubmitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
    info.commandBufferCount = static_cast<uint32_t>(commands.size());
    info.pCommandBuffers = commands.data();
    VkResult result;
    ++n_submitting_;
    {
        const py::gil_scoped_release no_gil;  // before the lock: its holder may want the GIL
        const std::lock_guard lock(queue.mutex);
        result = VKMOE_ATTEMPT(vkQueueSubmit, queue.handle, 1u, &info, submission->fence());
    }
    --n_submitting_;
    if (result != VK_SUCCESS) {
        submission->release();
        throw VulkanError(context_->note(result), "vkQueueSubmit");
    }
    submission->started();
    in_flight_.push_back(submission);
    return submission;
}

std::shared_ptr<Submission> Device::upload(const std::vector<Copy>& copies, bool timed) {
    timed = timed && has_timestamps("upload");
    Recorder recorder = this->recorder(timed ? 2 : 0, "upload");
    if (timed) recorder.timestamp(0);
    recorder.copy(copies);
    if (timed) recorder.timestamp(1);
    return submit({recorder.finish()}, "upload");
}

void Device::reap() {
    for (auto submission = in_flight_.begin(); submission != in_flight_.end();) {
        submission = (*submission)->done() ? in_flight_.erase(submission) : submission + 1;
    }
}

void Device::wait_idle() {
    context();
    const auto submissions = in_flight_;  // a copy: other threads may go on submitting
    for (const auto& submission : submissions) submission->wait(0, 0);
    reap();
}

bool Device::settle(uint64_t timeout_ns, const std::shared_ptr<Submission>& only) {
    context();
    const auto limit = duration(timeout_ns);
    if (only ? only->join(limit) : join(limit)) return true;
    pin();
    return false;
}

void Device::close(uint64_t timeout_ns) {
    if (!context_) return;
    closing_ = true;  // nothing is submitted any more but what is on its way
    const auto deadline = Submission::Clock::now() + duration(timeout_ns);
    while (n_submitting_ > 0 && Submission::Clock::now() < deadline) {
        const py::gil_scoped_release no_gil;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    const bool finished = join(deadline - Submission::Clock::now()) && n_submitting_ == 0;
    if (!context_) return;  // another thread has closed it meanwhile
    if (finished) return release_all();
    abandon();
    throw VulkanError(VK_TIMEOUT, "vkWaitForFences", "the device does not finish its work");
}

bool Device::join(Submission::Clock::duration limit) noexcept {
    const auto deadline = Submission::Clock::now() + limit;
    const auto submissions = in_flight_;  // a copy: other threads submit and reap during the wait
    for (const auto& submission : submissions) {
        if (!submission->join(deadline - Submission::Clock::now())) return false;
        in_flight_.erase(std::remove(in_flight_.begin(), in_flight_.end(), submission),
                         in_flight_.end());
    }
    return true;
}

/// Keeps alive what Python may let go of while the device still uses it, and refuses more work.
void Device::pin() {
    if (!context_) return;
    context_->note(VK_ERROR_DEVICE_LOST);
    std::vector<std::shared_ptr<Resource>> alive;
    for (const auto& child : children_) {
        if (auto resource = child.lock()) alive.push_back(std::move(resource));
    }
    pinned_ = std::move(alive);  // what was pinned before is among them
}

void Device::abandon() {
    pin();
    move_to(abandoned().resources, pinned_);
    move_to(abandoned().submissions, in_flight_);
    children_.clear();
    placeholder_.reset();
    context_.reset();
}

void Device::release_all() noexcept {
    in_flight_.clear();
    // In any order: nothing is in flight, and no object needs another's handle to go.
    for (const auto& child : children_) {
        if (const auto resource = child.lock()) resource->release();
    }
    children_.clear();
    pinned_.clear();
    placeholder_.reset();
    context_->upload_pools().close();
    context_->fences().close();
    context_.reset();
}

void join_all_devices() noexcept {
    const auto devices = open_devices();  // a copy: waiting lets other threads run
    for (Device* const device : devices) {
        if (open_devices().count(device) > 0) device->join(kJoinLimit);
    }
    for (const auto& submission : abandoned().submissions) submission->join(kJoinLimit);
}

}  // namespace vkmoe
