#include "pool.hpp"

#include <stdexcept>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vkmoe {

namespace {

// Polls before a thread sleeps: more would take the processor from others that need it, and beside
// one busy process cost more than half of the speed (bench/results).
constexpr int kPolls = 200;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>&, uint32_t) { std::this_thread::yield(); }

void wake_all(std::atomic<uint32_t>&) {}
#endif

constexpr uint64_t bounds(uint64_t first, uint64_t end) { return first << 32 | end; }

}  // namespace

void Event::wait_while(uint32_t value) {
    for (int polls = 0; word_.load() == value; ++polls) {
        if (polls < kPolls) {
            pause();
            continue;
        }
        // Either `advance` sees this thread, or the system sees that the word has changed.
        ++n_asleep_;
        sleep_while(word_, value);
        --n_asleep_;
    }
}

void Event::advance() {
    ++word_;
    if (n_asleep_.load() != 0) wake_all(word_);
}

void Ranges::share_out(size_t n_items) {
    const size_t n = parts_.size();
    for (size_t i = 0; i < n; ++i) {
        parts_[i].bounds.store(bounds(n_items * i / n, n_items * (i + 1) / n),
                               std::memory_order_relaxed);
    }
}

size_t Ranges::take(size_t thread) {
    const size_t n = parts_.size();
    for (size_t i = 0; i < n; ++i) {
        std::atomic<uint64_t>& part = parts_[(thread + i) % n].bounds;
        uint64_t now = part.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t first = now >> 32, end = now & 0xFFFFFFFF;
            if (first >= end) break;
            const bool is_own = i == 0;
            const uint64_t left = is_own ? bounds(first + 1, end) : bounds(first, end - 1);
            if (part.compare_exchange_weak(now, left, std::memory_order_relaxed)) {
                return static_cast<size_t>(is_own ? first : end - 1);
            }
        }
    }
    return kNone;
}

Pool::Pool(size_t n_threads) {
    if (n_threads == 0) throw std::invalid_argument("no threads");
    threads_.reserve(n_threads - 1);
    try {
        for (size_t thread = 1; thread < n_threads; ++thread) {
            threads_.emplace_back([this, thread] { work(thread); });
        }
    } catch (...) {
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

void Pool::end() {
    ending_ = true;
    begun_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::vector<Step>& steps) {
    const std::lock_guard<std::mutex> lock(running_);
    while (ranges_.size() < steps.size()) ranges_.emplace_back(n_threads());
    for (size_t i = 0; i < steps.size(); ++i) ranges_[i].share_out(steps[i].n_items);
    steps_ = &steps;
    failed_ = false;
    begun_.advance();
    run_as(0);
    meet();
    if (failed_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Pool::work(size_t thread) {
    for (uint32_t seen = 0;; ++seen) {
        begun_.wait_while(seen);
        if (ending_) return;
        run_as(thread);
        meet();
    }
}

void Pool::run_as(size_t thread) {
    for (size_t i = 0; i < steps_->size(); ++i) {
        const Step& step = (*steps_)[i];
        if (step.waits) meet();
        try {
            for (size_t item; (item = ranges_[i].take(thread)) != Ranges::kNone;) {
                if (failed_.load(std::memory_order_relaxed)) break;
                step.run(item, thread);
            }
        } catch (...) {
            if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
    }
}

void Pool::meet() {
    const uint32_t meeting = met_.value();
    if (++n_arrived_ == n_threads()) {
        n_arrived_ = 0;
        met_.advance();
    } else {
        met_.wait_while(meeting);
    }
}

}  // namespace vkmoe
