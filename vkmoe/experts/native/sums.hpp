// Sums over rows of numbers, added up in a fixed order: the same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vkmoe {

/// Of some layers: how often `after` was used when `before` was, and how often `before` was at all.
struct Pairs {
    float* counts;  // [layer, before, after]
    float* seen;    // [layer, before]
    size_t n_experts;
};

/// Experts of some layers, as many of each.
struct Used {
    const uint32_t* ids;  // [layer, n_used]
    size_t n_layers;
    size_t n_used;
};

/// Each of these was followed by each of those of its layer.
void learn(const Pairs& pairs, const Used& before, const Used& after, float weight);

/// How often each expert followed these, averaged over them: `shares` [layer, n_experts].
void follow(const Pairs& pairs, const Used& used, float weight, double* shares);

using Rows = std::vector<const double*>;  // [n_rows][n]

/// The sum of the rows, each times its factor: `sums` [n].
void blend(const Rows& rows, const std::vector<double>& factors, size_t n, double* sums);

/// The sums of the products of every two rows: `sums` [n_rows, n_rows].
void products(const Rows& rows, size_t n, double* sums);

}  // namespace vkmoe
