// Brings frozen entries back that the queries of a step would attend to, before the head is
// attended to. Sketches of the keys, in memory, tell which entries these are, so only
// their pages of storage are read. An object holds the scratch of one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "store/freezer.hpp"

namespace entropykv {

constexpr int kMostQueryRows = 128;  // queries of a KV head that recall considers
constexpr int kMostRecalled = 2048;  // entries that can come back to a head in one step

class Recall {
public:
    explicit Recall(StoreCommon& common) : common_(common), freezer_(common) {}

    // Makes room for heads of n entries, and for pages of page_entries entries and page_bytes
    // bytes.
    void size(std::size_t n, std::size_t page_entries, std::size_t page_bytes);
    void size_for_records(std::size_t n);
    std::size_t bytes() const;

    // Returns how many entries may come back to a head in one step.
    static int most(const Head& head) { return std::min(head.frozen.n_now(), kMostRecalled); }

    // Brings back frozen entries that the queries need, into free room or in exchange for the least
    // important held ones. now: the newest position of the micro-batch, whose n_staged entries will
    // be committed; buffer: has room for a page of storage.
    void run(Head& head, int n_staged, const QueryRows& queries, std::int32_t now,
             std::byte* buffer) noexcept;

private:
    // Names an entry that comes back, and where its rows are.
    struct Incoming {
        int record_number = ColdHead::kNone;
        // Points to what ColdHead::read() returns; null: the rows are in copied_page().
        const std::byte* rows = nullptr;
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
    void replace_victim(Head& head, int victim, int next, int n_incoming,
                        std::int32_t now) noexcept;
    std::byte* copied_page(const PageLayout& layout, int i) {
        return copies_.data() + index(i / layout.entries) * layout.bytes;
    }

    StoreCommon& common_;
    Freezer freezer_;
    int room_ = 0;  // free room of the head, in entries
    std::vector<float> logits_{};
    std::vector<float> masses_{};        // for each query, the log of the sum of e^(q.k)
    std::vector<float> active_needs_{};  // how much each held entry is needed
    std::vector<std::int32_t> victims_{};
    std::vector<float> needs_{};        // how much each record is needed
    std::vector<std::int32_t> best_{};  // numbers of the selected records
    AlignedBytes copies_{};
    std::vector<Incoming> incoming_{};
};

}  // namespace entropykv
