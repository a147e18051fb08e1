// Ranks the entries of a head, stored and staged ones: what queries gave them becomes importance,
// and importance becomes the scores of an eviction. Scratch of one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/store_common.hpp"

namespace entropykv {

class Ranking {
public:
    explicit Ranking(const StoreCommon& common) : common_(common) {}

    // Room for heads of n entries; of a page, and of a key.
    void size(std::size_t n, std::size_t page_entries, std::size_t key_values);
    std::size_t bytes() const;

    // Adds what queries gave to every entry, stored ones first, to its importance.
    void add_observed(Head& head, const StagedEntries& staged,
                      const float* observed) const noexcept;

    // Takes the largest share of attention that a query of a repetition gave to every entry in the
    // place of what is predicted of it, where it is larger.
    void note_looked_up(Head& head, const StagedEntries& staged,
                        const float* looked_up) const noexcept;

    // Scores all entries, of which `keep` are to stay; the newest position is then newest().
    void score(const Head& head, const StagedEntries& staged, int keep) noexcept;
    std::int32_t newest() const { return newest_; }
    // What the head would lose, had it kept so many of those that were scored beyond the protected
    // ones as the knots say; output_squares: of its outputs, which are squares where scores are.
    void measure_losses(Head& head, int total, std::int32_t newest, float output_squares) noexcept;
    // Marks in mask() the `keep` that stay of those that were scored, and those that must; how many
    // are marked. See select_survivors().
    int select(int total, int keep, const Protection& protection, std::int32_t newest) noexcept;

    const std::int32_t* positions() const { return positions_.data(); }
    const float* scores() const { return scores_.data(); }
    std::uint8_t* mask() { return mask_.data(); }

private:
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    void gather(const Head& head, const StagedEntries& staged) noexcept;
    void score_singly(int n) noexcept;
    void weigh_by_values(const Head& head, const StagedEntries& staged) noexcept;
    void expect(const Head& head, const StagedEntries& staged) noexcept;
    void add_softmax(int n) noexcept;
    void weigh_by_distinctness(const Head& head, const StagedEntries& staged, int keep) noexcept;

    const StoreCommon& common_;
    std::int32_t newest_ = 0;
    std::vector<std::int32_t> positions_{};
    std::vector<float> scores_{};
    std::vector<float> scratch_{};
    std::vector<float> of_page_{};
    std::vector<float> mean_{};  // of expected queries
    std::vector<float> half_variance_{};
    std::vector<std::int32_t> order_{};
    std::vector<float> keys_{};  // [k_dim][kContest]
    std::vector<std::uint8_t> mask_{};
};

}  // namespace entropykv
