// The Python module vkmoe.experts._residency: what arrays must look like, no arithmetic.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "admit.hpp"
#include "copies.hpp"
#include "landing.hpp"
#include "sums.hpp"
#include "turn.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace vkmoe {

namespace {

template <class Number>
using Array = py::array_t<Number, py::array::c_style>;
using Ids = Array<uint32_t>;

void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

Used used(const Ids& ids) {
    return {ids.data(), static_cast<size_t>(ids.shape(0)), static_cast<size_t>(ids.shape(1))};
}

Shares shares_of(Array<uint16_t>& experts, Array<uint16_t>& shares) {
    require(experts.ndim() == 3, "experts are not [n_rows, n_layers, width]");
    require(shares.ndim() == 3 && std::equal(experts.shape(), experts.shape() + 3, shares.shape()),
            "shares are not shaped like experts");
    return {experts.mutable_data(), shares.mutable_data(), static_cast<size_t>(experts.shape(1)),
            static_cast<size_t>(experts.shape(2))};
}

void learn_one_token(Array<uint16_t> experts, Array<uint16_t> shares, size_t row, const Ids& ids,
                     unsigned n) {
    const Shares known = shares_of(experts, shares);
    require(row < static_cast<size_t>(experts.shape(0)), "there is no such row");
    require(ids.ndim() == 2 && static_cast<size_t>(ids.shape(0)) == known.n_layers,
            "ids are not [n_layers, n_used]");
    require(static_cast<size_t>(ids.shape(1)) <= std::min(known.width, kMostUsed),
            "a row has no room for what a token uses");
    require(n >= 1 && n <= kWhole, "n is not from 1 to 65535");
    const uint32_t* const all = ids.data();
    require(std::all_of(all, all + ids.size(), [](uint32_t id) { return id <= kWhole; }),
            "an id does not fit in 16 bits");
    learn_token(known, row, used(ids), n);
}

Array<double> expected_shares(Array<uint16_t> experts, Array<uint16_t> shares,
                              const std::vector<size_t>& rows, const std::vector<double>& factors,
                              size_t n_experts) {
    const Shares known = shares_of(experts, shares);
    require(factors.size() == rows.size(), "not one factor for each row");
    const size_t n_entries = known.n_layers * known.width;
    for (const size_t row : rows) {
        require(row < static_cast<size_t>(experts.shape(0)), "there is no such row");
        const uint16_t* const ids = known.experts + row * n_entries;
        require(std::all_of(ids, ids + n_entries, [=](uint16_t id) { return id < n_experts; }),
                "an expert is not below n_experts");
    }
    Array<double> sums({known.n_layers, n_experts});
    std::fill_n(sums.mutable_data(), sums.size(), 0.0);
    for (size_t layer = 0; layer < known.n_layers; ++layer) {
        add_shares(known, layer, rows, factors, sums.mutable_data() + layer * n_experts);
    }
    return sums;
}

bool are_below(const Array<int64_t>& numbers, size_t end) {
    return std::all_of(numbers.data(), numbers.data() + numbers.size(), [=](int64_t number) {
        return number >= 0 && static_cast<size_t>(number) < end;
    });
}

template <class Number>
const Number* values_of(const Array<Number>& array, size_t n, const char* what) {
    require(array.ndim() == 1 && static_cast<size_t>(array.size()) == n, what);
    return array.data();
}

std::vector<std::pair<size_t, int64_t>> admit_newcomers(
    const Array<int64_t>& keys, const std::optional<Array<double>>& bids,
    const Array<int64_t>& pools, const Array<int64_t>& slot_bytes, size_t n_landed,
    double budget_bytes, const Array<int64_t>& holders, const Array<double>& values,
    const Array<int64_t>& n_free, const Array<int64_t>& newest, const Array<int64_t>& floors,
    const Array<bool>& may_leave, const Array<bool>& needed, const Array<int32_t>& recency,
    size_t n_experts) {
    const auto n = static_cast<size_t>(keys.size()), n_keys = static_cast<size_t>(needed.size());
    require(holders.ndim() == 2 && values.ndim() == 2 && holders.shape(0) == values.shape(0) &&
                holders.shape(1) == values.shape(1),
            "holders and values are not [n_pools, n_slots]");
    require(n_experts > 0 && n_keys % n_experts == 0, "needed is not [n_layers * n_experts]");
    const auto n_pools = static_cast<size_t>(holders.shape(0));
    const Newcomers newcomers{values_of(keys, n, "keys are not [n]"),
                              bids ? values_of(*bids, n, "bids are not [n]") : nullptr,
                              values_of(pools, n, "pools are not [n]"),
                              values_of(slot_bytes, n, "slot_bytes are not [n]"),
                              n,
                              n_landed,
                              budget_bytes};
    const Residents residents{holders.data(),
                              values.data(),
                              nullptr,
                              values_of(n_free, n_pools, "n_free is not [n_pools]"),
                              values_of(newest, n_pools, "newest is not [n_pools]"),
                              values_of(floors, n_pools, "floors are not [n_pools]"),
                              n_pools,
                              static_cast<size_t>(holders.shape(1)),
                              values_of(may_leave, n_keys + 1, "may_leave is not [n_keys + 1]"),
                              values_of(needed, n_keys, "needed is not [n_keys]"),
                              values_of(recency, n_keys + 1, "recency is not [n_keys + 1]"),
                              n_keys,
                              n_experts};
    require(are_below(keys, n_keys) && are_below(holders, n_keys + 1), "a key is not one");
    require(std::all_of(pools.data(), pools.data() + n, [=](int64_t pool) {
                return pool == kRoomy || (pool >= 0 && static_cast<size_t>(pool) < n_pools);
            }),
            "a newcomer is of no pool");
    std::vector<std::pair<size_t, int64_t>> found;
    for (const Admitted& one : admit(newcomers, residents)) {
        found.emplace_back(one.newcomer, one.victim);
    }
    return found;
}

Rows rows_of(const std::vector<Array<double>>& arrays) {
    require(!arrays.empty(), "no rows");
    Rows rows;
    for (const auto& array : arrays) {
        require(array.ndim() == 1 && array.size() == arrays[0].size(),
                "rows are not [n], and all as long");
        rows.push_back(array.data());
    }
    return rows;
}

Array<double> blend_rows(const std::vector<Array<double>>& arrays,
                         const std::vector<double>& factors) {
    const Rows rows = rows_of(arrays);
    require(factors.size() == rows.size(), "not one factor for each row");
    Array<double> sums(arrays[0].size());
    blend(rows, factors, static_cast<size_t>(sums.size()), sums.mutable_data());
    return sums;
}

Array<double> products_of_rows(const std::vector<Array<double>>& arrays) {
    const Rows rows = rows_of(arrays);
    Array<double> sums({rows.size(), rows.size()});
    products(rows, static_cast<size_t>(arrays[0].size()), sums.mutable_data());
    return sums;
}

template <class Number>
Array<Number> copied(const std::vector<Number>& numbers) {
    return Array<Number>(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

/// Which keys are hits, by the record or as given; bytes of distinct misses, the keys that landed,
/// and where in their layer.
py::tuple misses_of(const Array<int64_t>& keys, const Array<uint8_t>& state,
                    std::optional<Array<bool>> hits, const std::optional<Array<bool>>& stored,
                    const Array<int64_t>& span_bytes, size_t n_landing) {
    const auto has_shape = [&](const Array<bool>& marks) {
        return marks.ndim() == 3 && std::equal(keys.shape(), keys.shape() + 3, marks.shape());
    };
    require(keys.ndim() == 3, "keys are not [n_rows, n_layers, n_used]");
    const Used shape{nullptr, static_cast<size_t>(keys.shape(1)),
                     static_cast<size_t>(keys.shape(2))};
    const auto n_keys = static_cast<size_t>(state.size());
    const int64_t* const sizes = values_of(span_bytes, shape.n_layers, "not the bytes of each layer");
    require(shape.n_layers > 0 && n_keys % shape.n_layers == 0, "state is not [n_keys]");
    require(are_below(keys, n_keys), "a key is not one");
    if (!hits) {
        hits.emplace(std::vector<py::ssize_t>(keys.shape(), keys.shape() + 3));
        std::transform(keys.data(), keys.data() + keys.size(), hits->mutable_data(),
                       [&](int64_t key) { return state.data()[key] == kPresent; });
    }
    require(has_shape(*hits) && (!stored || has_shape(*stored)), "marks are not shaped like keys");
    const Misses found = misses(keys.data(), hits->data(), stored ? stored->data() : nullptr,
                                static_cast<size_t>(keys.shape(0)), shape,
                                n_keys / shape.n_layers, n_landing);
    const int64_t n_bytes = std::inner_product(sizes, sizes + shape.n_layers,
                                               found.n_of_layer.begin(), int64_t{0});
    return py::make_tuple(*hits, n_bytes, copied(found.landed), copied(found.places));
}

/// Addresses of the experts that changed go into `entries`: of their slots if they are present.
Array<int64_t> write_addresses(Array<bool> changed, const Array<uint8_t>& state,
                               const Array<int64_t>& slot_of, const Array<uint64_t>& of_slots,
                               const Array<uint64_t>& homes, Array<uint64_t> entries) {
    const auto n = static_cast<size_t>(changed.size()), n_slots = static_cast<size_t>(of_slots.size());
    bool* const marks = changed.mutable_data();
    bool* const end = marks + n;
    const auto next = [=](bool* from) {  // far faster than one by one: nearly none is marked
        void* const found = from == end ? nullptr : std::memchr(from, 1, end - from);
        return found == nullptr ? end : static_cast<bool*>(found);
    };
    const uint8_t* const states = values_of(state, n, "state is not [n_keys]");
    const int64_t* const slots = values_of(slot_of, n, "slot_of is not [n_keys]");
    const uint64_t* const at_home = values_of(homes, n, "homes are not [n_keys]");
    require(static_cast<size_t>(entries.size()) >= n, "there are fewer entries than keys");
    std::vector<int64_t> written;
    for (bool* mark = next(marks); mark != end; mark = next(mark + 1)) {
        const auto key = static_cast<size_t>(mark - marks);
        const bool has_slot = states[key] == kPresent;
        require(!has_slot || static_cast<size_t>(slots[key]) < n_slots, "there is no such slot");
        entries.mutable_data()[key] = has_slot ? of_slots.data()[slots[key]] : at_home[key];
        written.push_back(static_cast<int64_t>(key));
        *mark = false;
    }
    return copied(written);
}

/// The item of a move, a named tuple, without a conversion of all of it: there are many of them.
int64_t item_of(const py::handle& move, py::ssize_t index) {
    require(PyTuple_Check(move.ptr()) && PyTuple_GET_SIZE(move.ptr()) == 4, "it is not a move");
    const int64_t item = PyLong_AsLongLong(PyTuple_GET_ITEM(move.ptr(), index));
    if (item == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return item;
}

/// What moves are about: notes that no later version than this leads to the slots of victims, and
/// returns how many leave, and the experts whose copies can begin, with their slots.
py::tuple begin_moves(const py::sequence& moves, const Array<uint8_t>& state,
                      const Array<int64_t>& slot_of, const std::optional<Array<uint8_t>>& readable,
                      Array<int64_t> last_mapped, int64_t version, int64_t oldest_read) {
    const auto n = static_cast<size_t>(state.size());
    const Slots slots{state.data(), values_of(slot_of, n, "slot_of is not [n_keys]"),
                      last_mapped.mutable_data(),
                      readable ? values_of(*readable, n, "readable is not [n_keys]") : nullptr, n};
    const auto slot = [&](int64_t key) {
        require(key >= 0 && static_cast<size_t>(key) < n, "a key is not one");
        require(slots.slot_of[key] >= 0 && slots.slot_of[key] < last_mapped.size(),
                "there is no such slot");
        return slots.slot_of[key];
    };
    std::vector<int64_t> newcomers, numbers;
    size_t n_evicted = 0;
    for (const py::handle move : moves) {
        const int64_t key = item_of(move, 1), taken = slot(key);
        newcomers.push_back(key);
        if (item_of(move, 2) == kFree) continue;
        slots.last_mapped[taken] = version;
        ++n_evicted;
    }
    const auto keys = able(slots, newcomers, oldest_read);
    for (const int64_t key : keys) numbers.push_back(slot(key));
    return py::make_tuple(n_evicted, copied(keys), copied(numbers));
}

/// Experts keep the slots to land in that they are in; returns the numbers of those.
Array<int64_t> keep_landed(Array<uint8_t> state, Array<int64_t> slot_of, Array<bool> changed,
                           const Array<int64_t>& entry_of, Array<int64_t> holders,
                           Array<int64_t> slots, const Array<int64_t>& keys,
                           const Array<int64_t>& indices) {
    const auto n = static_cast<size_t>(state.size()), n_moved = static_cast<size_t>(keys.size());
    require(slots.ndim() == 2 && slots.shape(0) > 0 &&
                n % static_cast<size_t>(slots.shape(0)) == 0,
            "slots are not [n_layers, n_landing]");
    values_of(slot_of, n, "slot_of is not [n_keys]");
    values_of(changed, n, "changed is not [n_keys]");
    const auto n_landing = static_cast<size_t>(slots.shape(1));
    const int64_t* const places = values_of(indices, n_moved, "indices are not [n]");
    require(are_below(keys, n) && are_below(indices, n_landing), "a key or an index is not one");
    const Places record{state.mutable_data(),   slot_of.mutable_data(), changed.mutable_data(),
                        entry_of.data(),        holders.mutable_data(), n,
                        n / static_cast<size_t>(slots.shape(0))};
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < n_moved; ++i) {
        numbers.push_back(land(record, {slots.mutable_data(), n_landing}, keys.data()[i], places[i]));
    }
    return copied(numbers);
}

/// Returns the entries of `offered` that were written, and which of those waiting still do.
py::tuple offer_landing(const Array<int64_t>& waiting, Array<int64_t> slots,
                        const Array<int64_t>& last_mapped, const Array<uint64_t>& addresses,
                        int64_t oldest_read, Array<uint64_t> offered) {
    require(slots.ndim() == 2 && offered.ndim() == 2 && slots.shape(0) == offered.shape(0) &&
                slots.shape(1) <= offered.shape(1),
            "slots and offered are not [n_layers, n_landing]");
    require(are_below(waiting, static_cast<size_t>(slots.size())), "there is no such slot");
    values_of(addresses, static_cast<size_t>(last_mapped.size()), "addresses are not [n_slots]");
    std::vector<int64_t> numbers(waiting.data(), waiting.data() + waiting.size());
    for (const int64_t number : numbers) {
        const int64_t slot = slots.data()[number];
        require(slot >= 0 && slot < last_mapped.size(), "there is no such slot");
    }
    const Landing landing{slots.mutable_data(), static_cast<size_t>(slots.shape(1))};
    const auto written =
        offer(landing, last_mapped.data(), addresses.data(), oldest_read, offered.mutable_data(),
              static_cast<size_t>(offered.shape(1)), numbers);
    return py::make_tuple(copied(written), copied(numbers));
}

using Keys = Array<int64_t>;
// Tables of tokens, factors of counts, runs (rows, factors, doubt), shares, and which is scored.
using LookedAt = std::tuple<Array<uint16_t>, Array<uint16_t>, std::vector<double>,
                            std::vector<std::tuple<std::vector<size_t>, std::vector<double>, double>>,
                            std::vector<double>, size_t>;
// Keys: missing, those of them that landed, and those that may not leave.
using Missed = std::tuple<Keys, std::vector<int64_t>, Keys>;
// Places at home, whether all that leave need one, tolls of misses and of guesses, from which score
// and how many are guessed, bytes to be copied, and the first turn.
using Bounds = std::tuple<std::optional<Array<uint8_t>>, bool, std::pair<double, double>,
                          std::pair<double, size_t>, double, int32_t>;

/// The arrays that decisions are made in, which Python made: they stay alive, and the same ones.
class Turn {
public:
    Turn(Array<uint8_t> state, Array<int64_t> slot_of, Array<bool> changed, Array<int64_t> pool_of,
         Array<int32_t> recency, Array<bool> again, Array<int64_t> newest, Array<int64_t> floors,
         Array<int64_t> slot_bytes, std::vector<Array<double>> counts, size_t n_experts,
         py::type move)
        : held_(py::make_tuple(state, slot_of, changed, pool_of, recency, again, newest, floors,
                               slot_bytes, counts)),
          move_(std::move(move)),
          worth_(state.size()),
          scores_(state.size()) {
        const auto n = static_cast<size_t>(state.size()), n_pools = static_cast<size_t>(newest.size());
        require(PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(move_.ptr()), &PyTuple_Type),
                "move is not a named tuple");
        require(n_experts > 0 && n % n_experts == 0, "state is not [n_layers * n_experts]");
        record_ = {state.mutable_data(),
                   const_cast<int64_t*>(values_of(slot_of, n, "slot_of is not [n_keys]")),
                   const_cast<bool*>(values_of(changed, n, "changed is not [n_keys]")),
                   values_of(pool_of, n, "pool_of is not [n_keys]"),
                   const_cast<int32_t*>(values_of(recency, n + 1, "recency is not [n_keys + 1]")),
                   const_cast<bool*>(values_of(again, n + 1, "again is not [n_keys + 1]")),
                   newest.mutable_data(),
                   values_of(floors, n_pools, "floors are not [n_pools]"),
                   values_of(slot_bytes, n_pools, "slot_bytes are not [n_pools]"),
                   {},
                   n / n_experts,
                   n_experts,
                   n_pools};
        for (auto& each : counts) {
            values_of(each, n, "counts are not [n_keys]");
            record_.counts.push_back(each.mutable_data());
        }
    }

    void derive(const Array<uint8_t>& pins, const Array<int64_t>& entry_of, Array<int64_t> holders,
                Array<bool> unpinned, const Array<int64_t>& free, Array<int64_t> n_free) {
        const size_t n = record_.n_keys(), n_pools = record_.n_pools;
        require(holders.ndim() == 2 && free.ndim() == 2 &&
                    std::equal(holders.shape(), holders.shape() + 2, free.shape()) &&
                    static_cast<size_t>(holders.shape(0)) == n_pools,
                "holders and free are not [n_pools, n_slots]");
        derived_ = {values_of(pins, n, "pins are not [n_keys]"),
                    entry_of.data(),
                    holders.mutable_data(),
                    const_cast<bool*>(values_of(unpinned, n + 1, "unpinned is not [n_keys + 1]")),
                    free.data(),
                    const_cast<int64_t*>(values_of(n_free, n_pools, "n_free is not [n_pools]")),
                    static_cast<size_t>(holders.shape(1))};
        held_derived_ = py::make_tuple(pins, entry_of, holders, unpinned, free, n_free);
    }

    py::tuple observed(const Ids& ids, const std::vector<double>& weights, int32_t first_turn) {
        require(ids.ndim() == 2 && static_cast<size_t>(ids.shape(0)) == record_.n_layers,
                "ids are not [n_layers, n_used]");
        require(std::all_of(ids.data(), ids.data() + ids.size(),
                            [&](uint32_t id) { return id < record_.n_experts; }),
                "an id is not below n_experts");
        require(weights.size() <= record_.counts.size(), "more weights than counts");
        Array<int64_t> keys({ids.shape(0), ids.shape(1)});
        const auto missing = observe(record_, used(ids), weights, first_turn, keys.mutable_data());
        return py::make_tuple(keys, copied(missing));
    }

    py::tuple decided(const LookedAt& looked_at, const Missed& missed, const Bounds& bounds) {
        const auto& [missing, landed, needed] = missed;
        const auto& [host, backs, tolls, guessing, budget_bytes, first_turn] = bounds;
        require(!held_derived_.is_none(), "nothing was derived yet");
        require(!backs || host.has_value(), "there are no places at home");
        const size_t n_keys = record_.n_keys();
        require(are_below(missing, n_keys) && are_below(needed, n_keys),
                "a key is not one");
        const bool has_scores = looked_out(looked_at);
        const auto& [likely, most] = guessing;
        const Asked asked{missing.data(),
                          static_cast<size_t>(missing.size()),
                          landed,
                          needed.data(),
                          static_cast<size_t>(needed.size()),
                          host ? values_of(*host, n_keys, "host is not [n_keys]") : nullptr,
                          backs,
                          worth_.data(),
                          has_scores && most > 0 ? scores_.data() : nullptr,
                          likely,
                          most,
                          tolls.first,
                          tolls.second,
                          budget_bytes,
                          first_turn};
        bool renew = false;
        py::list moves, guessed;
        for (const Entered& one : decide(record_, derived_, asked, renew)) {
            moves.append(move(one));
            if (one.guessed) guessed.append(one.key);
        }
        return py::make_tuple(worth_, has_scores ? py::object(scores_) : py::none(), moves,
                              guessed, renew);
    }

private:
    /// A named tuple, without the Python code that would make it.
    py::object move(const Entered& one) const {
        auto made = py::reinterpret_steal<py::object>(
            PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(move_.ptr()), 4));
        if (!made) throw py::error_already_set();
        const int64_t numbers[] = {record_.pool_of[one.key], one.key, one.victim};
        for (int i = 0; i < 3; ++i) {
            PyTuple_SET_ITEM(made.ptr(), i, py::int_(numbers[i]).release().ptr());
        }
        PyTuple_SET_ITEM(made.ptr(), 3, py::bool_(one.landed).release().ptr());
        return made;
    }

    /// Finds worth, and scores if the run that they are of is known: returns whether it is.
    bool looked_out(const LookedAt& looked_at) {
        auto [experts, shares, factors, runs, run_shares, scored] = looked_at;
        require(factors.size() == record_.counts.size(), "not one factor for each count");
        require(run_shares.size() == runs.size() + 1, "not one share for each run, and one");
        const Shares known = shares_of(experts, shares);
        require(known.n_layers == record_.n_layers, "experts are not of as many layers");
        Outlook outlook{factors, {}, run_shares, scored};
        for (const auto& [rows, of_rows, doubt] : runs) {
            require(rows.size() == of_rows.size(), "not one factor for each row");
            for (const size_t row : rows) {
                require(row < static_cast<size_t>(experts.shape(0)), "there is no such row");
            }
            outlook.runs.push_back({rows, of_rows, doubt});
        }
        look_out(record_, known, outlook, worth_.mutable_data(), scores_.mutable_data());
        return scored < runs.size();
    }

    py::tuple held_;
    py::object held_derived_ = py::none();
    py::type move_;
    Array<double> worth_, scores_;  // made once: fresh memory would cost more than what is written
    Record record_{};
    Derived derived_{};
};

}  // namespace

PYBIND11_MODULE(_residency, module) {
    module.doc() = "The sums behind what experts are worth, and which of them get slots.";
    // Without a conversion, which would be a copy: what is learned stays in them.
    const auto experts = "experts"_a.noconvert(), shares = "shares"_a.noconvert();
    module.def("learn_token", learn_one_token, experts, shares, "row"_a, "ids"_a, "n"_a);
    module.def("expect", expected_shares, experts, shares, "rows"_a, "factors"_a, "n_experts"_a);
    module.def("admit", admit_newcomers, "keys"_a, "bids"_a, "pools"_a, "slot_bytes"_a,
               "n_landed"_a, "budget_bytes"_a, "holders"_a, "values"_a, "n_free"_a, "newest"_a,
               "floors"_a, "may_leave"_a, "needed"_a, "recency"_a, "n_experts"_a);
    py::class_<Turn>(module, "Turn")
        .def(py::init<Array<uint8_t>, Keys, Array<bool>, Keys, Array<int32_t>, Array<bool>, Keys,
                      Keys, Keys, std::vector<Array<double>>, size_t, py::type>(),
             "state"_a.noconvert(), "slot_of"_a.noconvert(), "changed"_a.noconvert(),
             "pool_of"_a.noconvert(), "recency"_a.noconvert(), "again"_a.noconvert(),
             "newest"_a.noconvert(), "floors"_a.noconvert(), "slot_bytes"_a.noconvert(),
             "counts"_a.noconvert(), "n_experts"_a, "move"_a)
        .def("derive", &Turn::derive, "pins"_a.noconvert(), "entry_of"_a.noconvert(),
             "holders"_a.noconvert(), "unpinned"_a.noconvert(), "free"_a.noconvert(),
             "n_free"_a.noconvert())
        .def("observe", &Turn::observed, "ids"_a, "weights"_a, "first_turn"_a)
        .def("decide", &Turn::decided, "looked_at"_a, "missed"_a, "bounds"_a);
    module.def("blend", blend_rows, "rows"_a, "factors"_a);
    module.def("misses", misses_of, "keys"_a, "state"_a, "hits"_a, "stored"_a, "span_bytes"_a,
               "n_landing"_a);
    module.def("write_addresses", write_addresses, "changed"_a.noconvert(), "state"_a.noconvert(),
               "slot_of"_a.noconvert(), "of_slots"_a.noconvert(), "homes"_a.noconvert(),
               "entries"_a.noconvert());
    module.def("begin_moves", begin_moves, "moves"_a, "state"_a.noconvert(),
               "slot_of"_a.noconvert(), "readable"_a, "last_mapped"_a.noconvert(), "version"_a,
               "oldest_read"_a);
    module.def("land", keep_landed, "state"_a.noconvert(), "slot_of"_a.noconvert(),
               "changed"_a.noconvert(), "entry_of"_a.noconvert(), "holders"_a.noconvert(),
               "slots"_a.noconvert(), "keys"_a, "indices"_a);
    module.def("offer", offer_landing, "waiting"_a, "slots"_a.noconvert(),
               "last_mapped"_a.noconvert(), "addresses"_a.noconvert(), "oldest_read"_a,
               "offered"_a.noconvert());
    module.def("products", products_of_rows, "rows"_a);
}

}  // namespace vkmoe
