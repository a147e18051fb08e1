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
};

// Pages that hold `entries` entries.
int pages_for(int entries, int entries_per_page);

// weights = clamp(entropy / mean, low, high), the BitNet document's factor.
std::vector<double> entropy_weights(const std::vector<double>& entropies, double mean, double low,
                                    double high);

// Entries per KV head. Every head gets the floor; what is beyond it is shared in proportion to the
// weights, in whole pages, so that neither the sum of entries exceeds mean_entries times the heads
// nor the pages exceed those of the same sum shared equally. A head that would exceed max_entries
// gets that, and the others share the rest. Throws std::invalid_argument when mean_entries is
// below floor_entries.
std::vector<int> share_budget(const BudgetRequest& request);

}  // namespace entropykv
