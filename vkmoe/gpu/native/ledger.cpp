#include "ledger.hpp"

#include <atomic>
#include <mutex>
#include <vector>

namespace vkmoe {

namespace {

struct Injection {
    std::string call;
    unsigned after;
    VkResult result;
};

struct Ledger {
    std::mutex mutex;
    std::map<std::string, int64_t> live;
    std::vector<Injection> injections;
    std::atomic<bool> any_injection{false};
};

// Never destroyed: Python may drop the last objects after C++ static destructors have run.
Ledger& ledger() {
    static Ledger* const instance = new Ledger;
    return *instance;
}

void add(const char* kind, int64_t change) {
    Ledger& book = ledger();
    const std::lock_guard lock(book.mutex);
    const auto entry = book.live.try_emplace(kind, 0).first;
    entry->second += change;
    if (entry->second == 0) book.live.erase(entry);
}

}  // namespace

void count_created(const char* kind) { add(kind, 1); }
void count_destroyed(const char* kind) { add(kind, -1); }

std::map<std::string, int64_t> live_objects() {
    Ledger& book = ledger();
    const std::lock_guard lock(book.mutex);
    return book.live;
}

void inject_failure(const std::string& call, unsigned after, VkResult result) {
    Ledger& book = ledger();
    const std::lock_guard lock(book.mutex);
    book.injections.push_back({call, after, result});
    book.any_injection = true;
}

void clear_injections() {
    Ledger& book = ledger();
    const std::lock_guard lock(book.mutex);
    book.injections.clear();
    book.any_injection = false;
}

std::optional<VkResult> injected(const char* call) {
    Ledger& book = ledger();
    if (!book.any_injection) return std::nullopt;
    const std::lock_guard lock(book.mutex);
    for (auto entry = book.injections.begin(); entry != book.injections.end(); ++entry) {
        if (entry->call != call) continue;
        if (entry->after > 0) {
            --entry->after;
            continue;
        }
        const VkResult result = entry->result;
        book.injections.erase(entry);
        book.any_injection = !book.injections.empty();
        return result;
    }
    return std::nullopt;
}

}  // namespace vkmoe
