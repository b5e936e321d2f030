// Threads that run lists of steps together, each step's items shared out in contiguous ranges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace vkmoe {

/// A count that threads wait for: they poll for a moment, then sleep.
class Event {
public:
    uint32_t value() const { return word_.load(); }

    /// Wait until the count is no longer `value`.
    void wait_while(uint32_t value);

    /// Count one more, and wake all that wait.
    void advance();

private:
    std::atomic<uint32_t> word_{0}, n_asleep_{0};
};

/// The items of one step: a range for each thread, which takes from its front; a thread without any
/// takes from the back of another's. Neighbouring rows stay together, as prefetching likes them.
class Ranges {
public:
    explicit Ranges(size_t n_threads) : parts_(n_threads) {}

    /// Share out `n_items` anew. Must hold: no thread takes any.
    void share_out(size_t n_items);

    /// The next item for a thread; kNone when all are taken.
    size_t take(size_t thread);

    static constexpr size_t kNone = static_cast<size_t>(-1);

private:
    struct alignas(64) Part {
        std::atomic<uint64_t> bounds{0};  // first item in the upper half, end in the lower one
    };

    std::vector<Part> parts_;
};

/// What all threads do together: `run` is called by each of them, until no item is left.
struct Step {
    size_t n_items;
    std::function<void(size_t item, size_t thread)> run;
    bool waits;  // until all steps before it are done
};

/// Threads that wait for work; the caller is thread 0.
///
/// What a step writes depends on its items alone, never on which thread has one, so that the number
/// of threads changes no result.
class Pool {
public:
    /// Throws std::system_error where the system refuses a thread, std::invalid_argument for 0.
    explicit Pool(size_t n_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    size_t n_threads() const { return threads_.size() + 1; }

    /// Run the steps in order; returns when all are done. One call at a time. Throws what a step
    /// throws first: then the rest of the steps is left out.
    void run(const std::vector<Step>& steps);

private:
    void work(size_t thread);
    void run_as(size_t thread);
    void meet();  // wait until all threads are here
    void end();

    std::vector<std::thread> threads_;
    std::mutex running_;
    const std::vector<Step>* steps_ = nullptr;
    std::vector<Ranges> ranges_;  // of each step
    Event begun_, met_;
    std::atomic<uint32_t> n_arrived_{0};
    std::atomic<bool> ending_{false}, failed_{false};
    std::exception_ptr failure_;
};

}  // namespace vkmoe
