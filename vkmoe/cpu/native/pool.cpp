#include "pool.hpp"

#include <chrono>
#include <stdexcept>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vkmoe {

namespace {

// Polls before a thread sleeps: what takes longer is a thread that another program runs in place of.
constexpr int kPolls = 800;
// How long a thread runs before it lets other programs have its processor, measured beside a busy
// process: 300 to 1000 us are alike, less or more cost speed.
constexpr std::chrono::microseconds kTurn{500};

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

/// The time that a thread has run without letting other programs have its processor.
class Turn {
public:
    /// Let another program run, if one waits for this processor and the turn is over. To be called
    /// where no thread waits for this one: else the system stops it in the middle of an item, and
    /// all the others wait.
    void give_way() {
        if (Clock::now() - began_ < kTurn) return;
        std::this_thread::yield();
        began_ = Clock::now();
    }

private:
    using Clock = std::chrono::steady_clock;

    Clock::time_point began_ = Clock::now();
};

/// A range in one word: 24 bits of the run's number, then 20 each of its first item and its end.
constexpr uint64_t packed(uint64_t run, uint64_t first, uint64_t end) {
    return run << 40 | first << 20 | end;
}

constexpr uint64_t run_of(uint64_t range) { return range >> 40; }
constexpr uint64_t first_of(uint64_t range) { return range >> 20 & 0xFFFFF; }
constexpr uint64_t end_of(uint64_t range) { return range & 0xFFFFF; }
constexpr uint64_t short_number(uint32_t run) { return run & 0xFFFFFF; }

}  // namespace

bool Event::wait_while(uint32_t value) {
    bool slept = false;
    for (int polls = 0; word_.load() == value; ++polls) {
        if (polls < kPolls) {
            pause();
            continue;
        }
        // Either `advance` sees this thread, or the system sees that the word has changed.
        ++n_asleep_;
        sleep_while(word_, value);
        --n_asleep_;
        slept = true;
    }
    return slept;
}

void Event::advance() {
    ++word_;
    if (n_asleep_.load() != 0) wake_all(word_);
}

void Ranges::share_out(size_t n_items, uint32_t run) {
    const size_t n = parts_.size();
    for (size_t i = 0; i < n; ++i) {
        const size_t first = n_items * i / n, end = n_items * (i + 1) / n;
        parts_[i].bounds.store(packed(short_number(run), first, end), std::memory_order_relaxed);
    }
}

size_t Ranges::take(size_t thread, uint32_t run) {
    const size_t n = parts_.size();
    for (size_t i = 0; i < n; ++i) {
        std::atomic<uint64_t>& part = parts_[(thread + i) % n].bounds;
        uint64_t now = part.load(std::memory_order_relaxed);
        while (run_of(now) == short_number(run)) {
            const uint64_t first = first_of(now), end = end_of(now);
            if (first >= end) break;
            const bool is_own = i == 0;
            const uint64_t left = is_own ? packed(run_of(now), first + 1, end)
                                         : packed(run_of(now), first, end - 1);
            if (part.compare_exchange_weak(now, left, std::memory_order_relaxed)) {
                return static_cast<size_t>(is_own ? first : end - 1);
            }
        }
    }
    return kNone;
}

Pool::Room::Room(size_t n_steps, size_t n_threads) : phases(n_steps) {
    ranges.reserve(n_steps);
    while (ranges.size() < n_steps) ranges.emplace_back(n_threads);
}

Pool::Pool(size_t n_threads) : n_threads_(n_threads) {
    if (n_threads == 0) throw std::invalid_argument("no threads");
    threads_.reserve(n_threads - 1);
    room_for(1);
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
    phase_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::vector<Step>& steps) {
    const std::lock_guard<std::mutex> lock(running_);
    Room& room = room_for(steps.size());
    const uint32_t first = phase_.value() + 1;
    divide(room, steps, first);
    failed_ = false;
    const uint32_t end = first + room.n_phases;
    phase_.advance();
    Turn turn;
    for (uint32_t now = phase_.value(); now != end; now = phase_.value()) {
        take_part(now, 0);
        if (phase_.value() == end) break;
        turn.give_way();
        if (phase_.wait_while(now)) turn = Turn();
    }
    if (failed_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

/// What a run of so many steps is divided into; threads that are late keep the one they look at.
Pool::Room& Pool::room_for(size_t n_steps) {
    if (rooms_.empty() || rooms_.back()->ranges.size() < n_steps) {
        rooms_.push_back(std::make_unique<Room>(2 * n_steps, n_threads_));
        room_ = rooms_.back().get();
    }
    return *rooms_.back();
}

/// Make phases of the steps, each of which begins where one waits; those without items are left out.
void Pool::divide(Room& room, const std::vector<Step>& steps, uint32_t run) const {
    uint32_t n_phases = 0;
    size_t n_left = 0;
    const auto close = [&](uint32_t end) {
        if (n_left == 0) return;
        Phase& phase = room.phases[n_phases++];
        phase.end.store(end, std::memory_order_relaxed);
        phase.n_left.store(n_left, std::memory_order_relaxed);
        n_left = 0;
    };
    for (uint32_t i = 0; i < steps.size(); ++i) {
        if (steps[i].waits) close(i);
        if (n_left == 0) room.phases[n_phases].first.store(i, std::memory_order_relaxed);
        room.ranges[i].share_out(steps[i].n_items, run);
        n_left += steps[i].n_items;
    }
    close(static_cast<uint32_t>(steps.size()));
    room.steps.store(steps.data(), std::memory_order_relaxed);
    room.n_phases.store(n_phases, std::memory_order_relaxed);
    room.run.store(run, std::memory_order_relaxed);
}

void Pool::work(size_t thread) {
    Turn turn;
    for (uint32_t now = phase_.value(); !ending_; now = phase_.value()) {
        take_part(now, thread);
        turn.give_way();
        if (phase_.wait_while(now)) turn = Turn();
    }
}

/// Run items of a phase until all are taken; open the next one if the last of them is done. Does
/// nothing for a phase that is over.
void Pool::take_part(uint32_t phase, size_t thread) {
    Room& room = *room_.load();
    const uint32_t run = room.run.load(std::memory_order_relaxed), index = phase - run;
    if (index >= room.n_phases.load(std::memory_order_relaxed)) return;
    Phase& open = room.phases[index];
    size_t n_done = 0;
    for (uint32_t i = open.first; i < open.end; ++i) n_done += run_items(room, i, run, thread);
    if (n_done != 0 && open.n_left.fetch_sub(n_done) == n_done) phase_.advance();
}

/// Run items of a step until all are taken; returns how many.
size_t Pool::run_items(Room& room, uint32_t step, uint32_t run, size_t thread) {
    size_t n_done = 0;
    for (size_t item; (item = room.ranges[step].take(thread, run)) != Ranges::kNone; ++n_done) {
        if (failed_.load(std::memory_order_relaxed)) continue;
        try {
            room.steps.load(std::memory_order_relaxed)[step].run(item, thread);
        } catch (...) {
            if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
    }
    return n_done;
}

}  // namespace vkmoe
