// Threads that run lists of steps together, each step's items shared out in contiguous ranges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace vkmoe {

/// A count that threads wait for: they poll for a moment, then sleep.
class Event {
public:
    uint32_t value() const { return word_.load(); }

    /// Wait until the count is no longer `value`; returns whether this thread slept.
    bool wait_while(uint32_t value);

    /// Count one more, and wake all that wait.
    void advance();

private:
    std::atomic<uint32_t> word_{0}, n_asleep_{0};
};

/// The items of one step: a range for each thread, which takes from its front; a thread without any
/// takes from the back of another's. Neighbouring rows stay together, as prefetching likes them.
///
/// A range is of one run: a thread that still looks for items of an earlier one finds none.
class Ranges {
public:
    explicit Ranges(size_t n_threads) : parts_(n_threads) {}

    /// Share out up to kMostItems anew, for the run of that number.
    void share_out(size_t n_items, uint32_t run);

    /// The next item of a run for a thread; kNone when all are taken.
    size_t take(size_t thread, uint32_t run);

    static constexpr size_t kNone = static_cast<size_t>(-1);
    static constexpr size_t kMostItems = (1U << 20) - 1;

private:
    struct alignas(64) Part {
        std::atomic<uint64_t> bounds{0};
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
/// of threads changes no result. No thread is waited for but one that has an item: where the system
/// lets another program run in its place, the others do its share.
class Pool {
public:
    /// Throws std::system_error where the system refuses a thread, std::invalid_argument for 0.
    explicit Pool(size_t n_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    size_t n_threads() const { return n_threads_; }

    /// Run the steps in order; returns when all are done. One call at a time. Throws what a step
    /// throws first: then the rest of the steps is left out.
    void run(const std::vector<Step>& steps);

private:
    /// Steps that run at the same time: they are done when no item is left.
    struct Phase {
        std::atomic<uint32_t> first{0}, end{0};  // steps
        std::atomic<size_t> n_left{0};           // items that are not done
    };

    /// What a run is divided into. Threads that are late may look at that of an earlier run.
    struct Room {
        Room(size_t n_steps, size_t n_threads);

        std::vector<Ranges> ranges;  // of each step
        std::vector<Phase> phases;
        std::atomic<const Step*> steps{nullptr};
        std::atomic<uint32_t> run{0}, n_phases{0};  // the number of the first phase, and how many
    };

    Room& room_for(size_t n_steps);
    void divide(Room& room, const std::vector<Step>& steps, uint32_t run) const;
    void work(size_t thread);
    void end();
    void take_part(uint32_t phase, size_t thread);
    size_t run_items(Room& room, uint32_t step, uint32_t run, size_t thread);

    size_t n_threads_;
    std::vector<std::thread> threads_;
    std::mutex running_;
    std::vector<std::unique_ptr<Room>> rooms_;  // the last is the largest, and in use
    std::atomic<Room*> room_{nullptr};
    Event phase_;  // the number of the phase that is open; the one behind a run's last has no items
    std::atomic<bool> ending_{false}, failed_{false};
    std::exception_ptr failure_;
};

}  // namespace vkmoe
