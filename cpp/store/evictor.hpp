// Decides which stored and staged entries a head keeps, and applies the decision. What queries gave
// to an entry is added to its importance, and the importance gives the scores that an eviction
// compares. If all entries fit the budget, all stay. Otherwise those that have left the window of
// their layer go first, then those with the lowest scores. An object holds the scratch of one
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/freezer.hpp"

namespace entropykv {

// Says how importance changes: it is multiplied by `factor`, and what queries gave to entries up to
// position `limit` is multiplied by `weight` and added (for some measures, the larger of the two
// counts).
struct GivenByQueries {
    float factor;
    float weight;
    std::int32_t limit;
};

class Evictor {
public:
    explicit Evictor(StoreCommon& common) : common_(common), freezer_(common) {}

    // Makes room for heads of n entries, and for a page.
    void size(std::size_t n, std::size_t page_entries);
    std::size_t bytes() const;

    // Lets the importance of all entries decay, and adds what queries gave to them: see
    // GivenByQueries. `observed` has the stored entries first.
    void add_observed(Head& head, const StagedEntries& staged,
                      const float* observed) const noexcept;
    // Does the same for the stored entries and the queries of single tokens: `sum` has, for
    // n_queries queries that were observed, what add_observed() would have added.
    void add_sum(Head& head, int n_queries, const float* sum) const noexcept;
    // Raises the predicted share of every entry to the largest share of attention that a query of
    // an echo gave to it.
    void raise_predicted_shares(Head& head, const StagedEntries& staged,
                                const float* echo_shares) const noexcept;

    // Stores the staged entries and evicts what exceeds the budget. output_squares: the sum of the
    // head's squared outputs, by which squared scores are divided where losses are measured.
    void commit(Head& head, const StagedEntries& staged, float output_squares) noexcept;
    // Evicts down to the budget between micro-batches.
    void evict_to_budget(Head& head) noexcept;

    // Returns room for one mark for every entry of a head, in the place of the last selection.
    std::uint8_t* mask() {
        selected_ = {};
        return mask_.data();
    }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void add(Head& head, const StagedEntries& staged, const float* observed,
             const GivenByQueries& given) const noexcept;
    void score(const Head& head, const StagedEntries& staged) noexcept;
    bool gather(const Head& head, const StagedEntries& staged) noexcept;
    void weigh_by_values(const Head& head, const StagedEntries& staged) noexcept;
    void measure_losses(Head& head, int total, std::int32_t newest, float output_squares) noexcept;

    void keep_highest_scored(Head& head, const StagedEntries& staged, int keep,
                             std::int32_t newest) noexcept;
    int select(int total, int keep, const Protection& protection, std::int32_t newest) noexcept;
    void count_dropped(Head& head, int total, int n_kept, const Protection& protection) noexcept;
    bool drop_outside_window(Head& head, const StagedEntries& staged) noexcept;
    bool drop_before(Head& head, const StagedEntries& staged, std::int32_t oldest) noexcept;

    // Says what was selected among the scored entries.
    struct Selection {
        int total = -1;
        int keep = 0;
        Protection protection{};
        std::int32_t newest = 0;
        int n_kept = 0;
    };

    StoreCommon& common_;
    Freezer freezer_;
    std::int32_t newest_ = 0;  // the newest position of the scored entries
    int n_scored_ = 0;         // how many entries positions_ and scores_ are of
    Selection selected_{};     // what mask_ marks; a total below 0: something else
    std::vector<std::int32_t> positions_{};
    std::vector<float> scores_{};
    std::vector<float> scratch_{};
    std::vector<float> of_page_{};
    std::vector<std::uint8_t> mask_{};
};

}  // namespace entropykv
