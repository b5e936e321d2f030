// What follows from a token for the next one: its uses are counted, and experts get slots, in the
// arrays that Python's record of them consists of. As decide/residency.py does it step by step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "admit.hpp"
#include "sums.hpp"

namespace vkmoe {

enum State : uint8_t { kAbsent, kPresent, kWaiting, kCopying };  // decide/locations.py

/// The record of places and of uses. All arrays are Python's.
struct Record {
    uint8_t* state;              // [n_keys]
    int64_t* slot_of;            // [n_keys]
    bool* changed;               // [n_keys]
    const int64_t* pool_of;      // [n_keys]: -1 for none
    int32_t* recency;            // [n_keys + 1]
    bool* again;                 // [n_keys + 1]: used again since it has its slot
    int64_t* newest;             // [n_pools]
    const int64_t* floors;       // [n_pools]
    const int64_t* slot_bytes;   // [n_pools]
    std::vector<double*> counts; // [n][n_keys]: uses, decayed over several half-lives
    size_t n_layers, n_experts, n_pools;

    size_t n_keys() const { return n_layers * n_experts; }
};

/// What follows from the record of places.
struct Derived {
    const uint8_t* pins;      // [n_keys]
    const int64_t* entry_of;  // by slot
    int64_t* holders;         // [pool, n_slots]: n_keys where none is
    bool* unpinned;           // [n_keys + 1]
    const int64_t* free;      // [pool, n_slots]: the first n_free are
    int64_t* n_free;          // [pool]
    size_t n_slots;
};

/// A token used these, whose `keys` [layer, n_used] are written. The first counts grow by their
/// weights; uses are numbered from `first_turn` on. Returns the keys without a slot, by rank, then
/// by layer, of layers that have slots.
std::vector<int64_t> observe(const Record& record, const Used& used,
                             const std::vector<double>& weights, int32_t first_turn,
                             int64_t* keys);

/// The tokens of a run that is known to come: rows of what is known of their ids, and the factor of
/// each; `doubt` is that of what all tokens use.
struct Run {
    std::vector<size_t> rows;
    std::vector<double> factors;
    double doubt;
};

/// What experts are worth to the tokens to come: see decide/foresight.py.
struct Outlook {
    std::vector<double> factors;  // of each count, in what all tokens use
    std::vector<Run> runs;        // the next one first
    std::vector<double> shares;   // of each run, and behind them of what all tokens use
    size_t scored;                // the run whose chances are scores, if there is one
};

/// Finds `worth` and `scores` [n_keys]; `known` is what is known of tokens.
void look_out(const Record& record, const Shares& known, const Outlook& outlook, double* worth,
              double* scores);

/// Of keys [row, layer, n_used] that are no hits, as many marks: how many are distinct in each layer
/// [n_layers]; and those that landed, with the place of their layer they are in, from 0 on. That is
/// their rank among what their row missed there. Those of some rank `n_landing` landed nowhere.
struct Misses {
    std::vector<int64_t> n_of_layer, landed, places;
};

Misses misses(const int64_t* keys, const bool* hits, const bool* stored, size_t n_rows,
              const Used& shape, size_t n_experts, size_t n_landing);

/// What is to be decided.
struct Asked {
    const int64_t* missing;  // without a slot, distinct
    size_t n_missing;
    std::vector<int64_t> landed;  // those of them that lie in a slot to land in
    const int64_t* used;  // may not leave
    size_t n_used;
    const uint8_t* host;  // [n_keys]: states; only what is present there can be copied; null: all
    bool backs;           // what is not present there may not leave
    const double* worth;  // [n_keys]
    const double* scores;  // [n_keys]: what is likely is fetched; null: nothing is
    double likely;         // a score above this
    size_t most;           // at most so many, the likeliest first
    double toll, guess_toll;  // what is copied must be worth so many times what leaves for it
    double budget_bytes;
    int32_t first_turn;  // entries are numbered from here on
};

/// An expert that got a slot.
struct Entered {
    int64_t key, victim;  // kFree: a free slot
    bool landed, guessed;
};

/// The experts that got slots, in the order of their claim; all of it is noted in the record.
/// `renew` is set where what is derived has to be derived anew.
std::vector<Entered> decide(const Record& record, const Derived& derived, const Asked& asked,
                            bool& renew);

}  // namespace vkmoe
