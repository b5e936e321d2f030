#include "sums.hpp"

#include <algorithm>
#include <array>

namespace vkmoe {

namespace {

constexpr size_t kStretch = 8;  // of a row: few enough to be summed up in registers
constexpr size_t kAhead = 32;   // what is fetched early, because rows lie far apart

double product(const double* one, const double* other, size_t n) {
    // Side by side, because each addition to one and the same sum waits for the one before.
    std::array<double, kStretch> stretch{};
    size_t first = 0;
    for (; first + kStretch <= n; first += kStretch) {
        for (size_t i = 0; i < kStretch; ++i) stretch[i] += one[first + i] * other[first + i];
    }
    for (size_t i = 0; first + i < n; ++i) stretch[i] += one[first + i] * other[first + i];
    double sum = 0;
    for (const double part : stretch) sum += part;
    return sum;
}

}  // namespace

void learn_token(const Shares& known, size_t row, const Used& used, unsigned n) {
    for (size_t layer = 0; layer < known.n_layers; ++layer) {
        const size_t first = (row * known.n_layers + layer) * known.width;
        uint16_t* const experts = known.experts + first;
        uint16_t* const shares = known.shares + first;
        const uint32_t* const ids = used.ids + layer * used.n_used;
        std::array<bool, kMostUsed> has_entry{};
        for (size_t i = 0; i < known.width; ++i) {
            const unsigned share = shares[i];
            if (share == 0) continue;
            const uint32_t* const end = ids + used.n_used;
            const uint32_t* const found = std::find(ids, end, experts[i]);
            if (found == end) {
                shares[i] = static_cast<uint16_t>(share - (share + n - 1) / n);
            } else {
                has_entry[static_cast<size_t>(found - ids)] = true;
                shares[i] = static_cast<uint16_t>(share + (kWhole - share) / n);
            }
        }
        const unsigned part = kWhole / n;
        for (size_t k = 0; k < used.n_used; ++k) {
            if (has_entry[k]) continue;
            uint16_t* const smallest = std::min_element(shares, shares + known.width);
            if (*smallest >= part) break;
            experts[smallest - shares] = static_cast<uint16_t>(ids[k]);
            *smallest = static_cast<uint16_t>(part);
        }
    }
}

void add_shares(const Shares& known, size_t layer, const std::vector<size_t>& rows,
                const std::vector<double>& factors, double* sums) {
    for (size_t k = 0; k < rows.size(); ++k) {
        const size_t first = (rows[k] * known.n_layers + layer) * known.width;
        const double factor = factors[k] / kWhole;
        for (size_t i = first; i < first + known.width; ++i) {
            sums[known.experts[i]] += factor * known.shares[i];
        }
    }
}

void blend(const Rows& rows, const std::vector<double>& factors, size_t n, double* sums) {
    size_t first = 0;
    for (; first + kStretch <= n; first += kStretch) {
        std::array<double, kStretch> stretch{};
        for (size_t k = 0; k < rows.size(); ++k) {
            const double* const row = rows[k] + first;
            __builtin_prefetch(row + kAhead);
            for (size_t i = 0; i < kStretch; ++i) stretch[i] += factors[k] * row[i];
        }
        std::copy(stretch.begin(), stretch.end(), sums + first);
    }
    for (; first < n; ++first) {
        double sum = 0;
        for (size_t k = 0; k < rows.size(); ++k) sum += factors[k] * rows[k][first];
        sums[first] = sum;
    }
}

void products(const Rows& rows, size_t n, double* sums) {
    const size_t n_rows = rows.size();
    for (size_t i = 0; i < n_rows; ++i) {
        for (size_t k = 0; k <= i; ++k) {
            sums[i * n_rows + k] = sums[k * n_rows + i] = product(rows[i], rows[k], n);
        }
    }
}

}  // namespace vkmoe
