// Recall by relevance: frozen entries that the queries of a step would attend to come back before
// the head is attended to. Their sketches say which; storage is read only for those that come.
// Scratch of one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "store/freezer.hpp"

namespace entropykv {

constexpr int kMostQueryRows = 128;  // that recall looks at
constexpr int kMostRecalled = 2048;  // entries that come back to a head in one step

class Recall {
public:
    explicit Recall(StoreCommon& common) : common_(common), freezer_(common) {}

    // Room to look through a head of n entries; of a page, in entries and in bytes.
    void size(std::size_t n, std::size_t page_entries, std::size_t page_bytes);
    // Room for so many records of a head.
    void size_for_records(std::size_t n);
    std::size_t bytes() const;

    // How many entries may come back to a head in one step, into room or in exchange.
    static int most(const Head& head) { return std::min(head.frozen.n_now(), kMostRecalled); }

    // Exchanges frozen entries that the queries need for the least important ones that the head
    // holds. now: the newest position of the micro-batch, of which n_staged entries will be
    // committed; buffer: a page of storage.
    void run(Head& head, int n_staged, const QueryRows& queries, std::int32_t now,
             std::byte* buffer) noexcept;

private:
    struct Incoming {  // an entry that comes back
        int home = ColdHead::kNone;
        const std::byte* rows = nullptr;  // as ColdHead::read() has them; null: in aside()
        ColdRecord record{};
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    float least_share(const Head& head) const noexcept;
    void weigh_active(const Head& head, const QueryRows& queries) noexcept;
    void weigh_frozen(const Head& head, const QueryRows& queries) noexcept;
    int find_victims(const Head& head, std::int32_t newest) noexcept;
    int take_best(const Head& head, std::int32_t newest, std::byte* buffer) noexcept;
    int choose_exchanges(const Head& head, int n, std::int32_t newest) noexcept;
    int find_rows(const Head& head, int n, std::byte* buffer) noexcept;
    void exchange(Head& head, int n_incoming, std::int32_t now) noexcept;
    void give_place(Head& head, int victim, int next, int n_incoming, std::int32_t now) noexcept;
    std::byte* aside(const PageLayout& layout, int i) {
        return aside_.data() + index(i / layout.entries) * layout.bytes;
    }

    StoreCommon& common_;
    Freezer freezer_;
    int room_ = 0;  // entries that the head may take besides
    std::vector<float> logits_{};
    std::vector<float> masses_{};        // of queries: log of the sum of e^(q.k)
    std::vector<float> active_needs_{};  // of the head's entries
    std::vector<std::int32_t> victims_{};
    std::vector<float> needs_{};        // of records
    std::vector<std::int32_t> best_{};  // records
    AlignedBytes aside_{};
    std::vector<Incoming> incoming_{};
};

}  // namespace entropykv
