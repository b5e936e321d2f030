// The Python module vkmoe.experts._sums: what arrays must look like, no arithmetic.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "sums.hpp"

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

/// The pairs of the layers from `first` on that `ids` are of, which may be looked up in them.
Pairs pairs_of(Array<float>& counts, Array<float>& seen, const Ids& ids, size_t first) {
    require(counts.ndim() == 3 && counts.shape(1) == counts.shape(2),
            "pairs are not [n_layers, n_experts, n_experts]");
    require(seen.ndim() == 2 && seen.shape(0) == counts.shape(0) &&
                seen.shape(1) == counts.shape(1),
            "seen is not [n_layers, n_experts] as pairs are");
    require(ids.ndim() == 2, "ids are not [n, n_used]");
    const auto n_layers = static_cast<size_t>(seen.shape(0));
    const auto n_experts = static_cast<size_t>(seen.shape(1));
    require(first <= n_layers && static_cast<size_t>(ids.shape(0)) <= n_layers - first,
            "ids are of more layers than there are");
    const uint32_t* const all = ids.data();
    for (py::ssize_t i = 0; i < ids.size(); ++i) {
        require(all[i] < n_experts, "an id is not below n_experts");
    }
    return {counts.mutable_data() + first * n_experts * n_experts,
            seen.mutable_data() + first * n_experts, n_experts};
}

Used used(const Ids& ids) {
    return {ids.data(), static_cast<size_t>(ids.shape(0)), static_cast<size_t>(ids.shape(1))};
}

void learn_pairs(Array<float> counts, Array<float> seen, const Ids& before, const Ids& after,
                 size_t first, float weight) {
    const Pairs pairs = pairs_of(counts, seen, before, first);
    pairs_of(counts, seen, after, first);
    require(before.shape(0) == after.shape(0), "before and after are not of as many layers");
    learn(pairs, used(before), used(after), weight);
}

Array<double> follow_pairs(Array<float> counts, Array<float> seen, const Ids& ids, size_t first,
                           float weight) {
    const Pairs pairs = pairs_of(counts, seen, ids, first);
    Array<double> shares({ids.shape(0), seen.shape(1)});
    follow(pairs, used(ids), weight, shares.mutable_data());
    return shares;
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
    add_shares(known, rows, factors, n_experts, sums.mutable_data());
    return sums;
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

}  // namespace

PYBIND11_MODULE(_sums, module) {
    module.doc() = "The sums behind what experts are worth.";
    // Without a conversion, which would be a copy: what is learned stays in them.
    const auto pairs = "pairs"_a.noconvert(), seen = "seen"_a.noconvert();
    module.def("learn", learn_pairs, pairs, seen, "before"_a, "after"_a, "first"_a, "weight"_a);
    module.def("follow", follow_pairs, pairs, seen, "ids"_a, "first"_a, "weight"_a);
    const auto experts = "experts"_a.noconvert(), shares = "shares"_a.noconvert();
    module.def("learn_token", learn_one_token, experts, shares, "row"_a, "ids"_a, "n"_a);
    module.def("expect", expected_shares, experts, shares, "rows"_a, "factors"_a, "n_experts"_a);
    module.def("blend", blend_rows, "rows"_a, "factors"_a);
    module.def("products", products_of_rows, "rows"_a);
}

}  // namespace vkmoe
