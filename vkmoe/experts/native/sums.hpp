// Sums over rows of numbers, added up in a fixed order: the same bits on every machine. Shares are
// whole numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vkmoe {

/// Experts of some layers, as many of each.
struct Used {
    const uint32_t* ids;  // [layer, n_used]
    size_t n_layers;
    size_t n_used;
};

/// What is known of tokens by their ids: for each, in each layer, `width` experts and what share of
/// the token's occurrences used them, in parts of kWhole. A share of 0: no expert.
struct Shares {
    uint16_t* experts;  // [row, layer, width]
    uint16_t* shares;   // [row, layer, width]
    size_t n_layers;
    size_t width;
};

constexpr unsigned kWhole = 65535;
constexpr size_t kMostUsed = 256;  // experts of a layer that a token uses, at most

/// The token of a row used these, and that counts one part in `n`. An expert that has no entry takes
/// that of the smallest share, if it is smaller than its own.
void learn_token(const Shares& known, size_t row, const Used& used, unsigned n);

/// The sum of a layer's shares in these rows, each times its factor, is added to `sums` [n_experts].
void add_shares(const Shares& known, size_t layer, const std::vector<size_t>& rows,
                const std::vector<double>& factors, double* sums);

using Rows = std::vector<const double*>;  // [n_rows][n]

/// The sum of the rows, each times its factor: `sums` [n].
void blend(const Rows& rows, const std::vector<double>& factors, size_t n, double* sums);

/// The sums of the products of every two rows: `sums` [n_rows, n_rows].
void products(const Rows& rows, size_t n, double* sums);

}  // namespace vkmoe
