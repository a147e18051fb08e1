// Scores the stored and staged entries of a head: what queries gave to them is added to their
// importance, and the importance gives the scores that an eviction compares. An object holds the
// scratch of one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/store_common.hpp"

namespace entropykv {

class Scorer {
public:
    explicit Scorer(const StoreCommon& common) : common_(common) {}

    // Makes room for heads of n entries, and for a page.
    void size(std::size_t n, std::size_t page_entries);
    std::size_t bytes() const;

    // Adds to the importance of every entry what queries gave to it; `observed` has the stored
    // entries first.
    void add_observed(Head& head, const StagedEntries& staged,
                      const float* observed) const noexcept;

    // Raises the predicted share of every entry to the largest share of attention that a query of
    // an echo gave to it.
    void raise_predicted_shares(Head& head, const StagedEntries& staged,
                                const float* echo_shares) const noexcept;

    // Scores all entries. Afterwards newest() is the newest position.
    void score(const Head& head, const StagedEntries& staged) noexcept;
    std::int32_t newest() const { return newest_; }
    // Measures what the head would lose if it kept only so many of the scored entries beyond the
    // protected ones as each knot says. output_squares: the sum of the head's squared outputs, by
    // which squared scores are divided.
    void measure_losses(Head& head, int total, std::int32_t newest, float output_squares) noexcept;
    // Marks in mask() the `keep` entries that stay and the protected ones; returns how many are
    // marked. See select_survivors().
    int select(int total, int keep, const Protection& protection, std::int32_t newest) noexcept;

    const std::int32_t* positions() const { return positions_.data(); }
    const float* scores() const { return scores_.data(); }
    std::uint8_t* mask() { return mask_.data(); }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void gather(const Head& head, const StagedEntries& staged) noexcept;
    void score_separately(int n) noexcept;
    void weigh_by_values(const Head& head, const StagedEntries& staged) noexcept;

    const StoreCommon& common_;
    std::int32_t newest_ = 0;
    std::vector<std::int32_t> positions_{};
    std::vector<float> scores_{};
    std::vector<float> scratch_{};
    std::vector<float> of_page_{};
    std::vector<std::uint8_t> mask_{};
};

}  // namespace entropykv
