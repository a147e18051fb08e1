// Profile + total -> entries per (layer, KV head). A pure decision.
#pragma once

#include <vector>

namespace entropykv {

struct BudgetRequest {
    int mean_entries;                   // what a KV head may keep on average
    int max_entries;                    // no head can use more (the context)
    int floor_entries;                  // sinks + recent window: no head gets less
    std::vector<int> entries_per_page;  // of every KV head, all layers in order
    std::vector<double> weights;        // of every KV head; empty: all the same
    std::vector<int> limits{};          // what each head can use; empty: max_entries

    int limit_of(std::size_t head) const;
    int floor_of(std::size_t head) const;
};

// Pages that hold `entries` entries.
int pages_for(int entries, int entries_per_page);

// weights = clamp(entropy / mean, low, high), the BitNet document's factor.
std::vector<double> entropy_weights(const std::vector<double>& entropies, double mean, double low,
                                    double high);

// Entries per KV head. Every head gets the floor; what is beyond it is shared in proportion to the
// weights, in whole pages, so that neither the sum of entries exceeds mean_entries times the heads
// nor the pages exceed those of the same sum shared equally. A head that would exceed max_entries
// gets that, and the others share the rest; so does one that would exceed its own limit. Throws
// std::invalid_argument when mean_entries is below floor_entries.
std::vector<int> share_budget(const BudgetRequest& request);

// What heads lose when they keep so many entries beyond their floor.
struct LossTable {
    std::vector<double> knots;   // entries beyond the floor, ascending from 0
    std::vector<double> losses;  // [head][knot], 0 or more
};

// Shares `total` entries so that the summed loss is least, each head's loss taken as the lower
// convex hull of its curve: the steepest segments of all hulls come first, and segments that are
// equally steep share in proportion to their lengths. No head gets more than the last knot, or than
// its entry in `most`, where that is not empty.
std::vector<double> curve_shares(const LossTable& curves, double total,
                                 const std::vector<double>& most = {});

// As share_budget, with what is beyond the floor shared by curve_shares; the request's weights are
// not used. The last knot should be max_entries - floor_entries.
std::vector<int> share_by_curves(const BudgetRequest& request, const LossTable& curves);

}  // namespace entropykv
