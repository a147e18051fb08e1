// Shares a total number of entries among the KV heads of all layers. Pure functions.
#pragma once

#include <vector>

namespace entropykv {

struct BudgetRequest {
    int mean_entries;   // the mean over all KV heads
    int max_entries;    // the context: no head can use more
    int floor_entries;  // sinks + recent window: a head gets less only if its limit is lower
    std::vector<int> entries_per_page;  // one for every KV head, layer by layer
    std::vector<double> weights;        // one for every KV head; empty: all are equal
    std::vector<int> limits{};          // what each head can use; empty: max_entries

    int limit_of(std::size_t head) const;
    int floor_of(std::size_t head) const;
};

int pages_for(int entries, int entries_per_page);

// Returns clamp(entropy / mean, low, high) for every head, the factor of README_ENTROPY_KV; 1 for
// every head if the mean is not above 0.
std::vector<double> entropy_weights(const std::vector<double>& entropies, double mean, double low,
                                    double high);

// Returns the entries of every KV head. Every head gets the floor, and what is beyond it is shared
// in proportion to the weights, in whole pages. Neither the sum of entries exceeds mean_entries
// times the heads, nor do the pages exceed those of equal budgets with the same sum. A head whose
// share would exceed max_entries or its own limit gets that limit, and the others share the rest.
// Throws std::invalid_argument if mean_entries is below floor_entries, for a page or a limit below
// 1, for a weight outside of 0 .. 1e6, and for lists of another length.
std::vector<int> share_budget(const BudgetRequest& request);

// Holds what each head loses if it keeps a number of entries (a knot) beyond its floor.
struct LossTable {
    std::vector<double> knots;   // entries beyond the floor, ascending from 0
    std::vector<double> losses;  // [head][knot], 0 or more
};

// Shares `total` entries so that the sum of losses is smallest, where the loss of each head is the
// lower convex hull of its curve: entries go to the steepest segments of all hulls first, and
// equally steep segments share in proportion to their lengths. No head gets more than the last
// knot, nor more than its number in `most`; empty: no other limit. Throws std::invalid_argument for
// knots that do not ascend from 0, and for losses that are not [head][knot] or not in 0 .. 1e9.
std::vector<double> curve_shares(const LossTable& curves, double total,
                                 const std::vector<double>& most = {});

// Works like share_budget(), but shares what is beyond the floor by curve_shares(), and ignores the
// weights. The last knot should be max_entries - floor_entries. Throws what these functions throw.
std::vector<int> share_by_curves(const BudgetRequest& request, const LossTable& curves);

}  // namespace entropykv
