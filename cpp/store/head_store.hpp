// What every KV head keeps: paged entries per (layer, KV head) in one pool, and the staging area
// that holds one micro-batch of one layer while it is attended to. Entries are in no order within
// a head; each knows its position.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cold/cold_head.hpp"
#include "decide/eviction.hpp"
#include "decide/freezing.hpp"
#include "decide/importance.hpp"
#include "decide/query_statistics.hpp"
#include "kernels/kernels.hpp"
#include "page/page_layout.hpp"
#include "platform/aligned_bytes.hpp"
#include "store/checkpoint.hpp"
#include "store/entry_copies.hpp"
#include "store/layer_shape.hpp"
#include "store/store_pool.hpp"

namespace entropykv {

// Of a layer with a window, KV heads hold more than what queries still see, so that they need not
// be looked through with every token. Where they are, some stay: a session may go back that far.
constexpr int kWindowSlack = 64;
constexpr int kWindowMargin = 32;

// Entries that a KV head of a layer can use, of max_entries.
int most_entries(const LayerShape& shape, int max_entries);

struct StoreSettings {
    KvType type = KvType::f16;
    ImportanceSettings importance;
    Protection protection{4, 1};
    bool own_windows = false;         // every head's recent window is half of its own budget
    int max_tokens = 512;             // largest micro-batch
    int max_entries = 0;              // no KV head ever keeps more (the context)
    std::vector<RopeParams> ropes{};  // of the layers; none: keys and queries have no position
    std::optional<FreezeSettings> freezing{};  // none: what is not kept is dropped
};

constexpr int kMostQueryRows = 128;  // that recall looks at
constexpr int kMostRecalled = 2048;  // entries that come back to a head in one step

// Which frozen entries somebody asks for.
struct Asked {
    std::int32_t frozen_after;  // newest position when they were frozen
    std::int32_t due_after;     // restored later than that by themselves
};

// Entries of one KV head as attention reads them, positions ascending.
struct StoredRows {
    std::vector<std::int32_t> positions;
    std::vector<float> importance;
    std::vector<float> k;  // [entries][k_dim]
    std::vector<float> v;  // [entries][v_dim]
};

class HeadStore {
public:
    // pool: which sequences of the same layers share; none: the store has one of its own, whose
    // budget is the store's.
    HeadStore(const std::vector<LayerShape>& layers, const StoreSettings& settings,
              std::shared_ptr<StorePool> pool = nullptr);
    ~HeadStore();
    HeadStore(const HeadStore&) = delete;
    HeadStore& operator=(const HeadStore&) = delete;

    int n_layers() const { return static_cast<int>(layers_.size()); }
    const LayerShape& shape(int layer) const { return layers_[index(layer)].shape; }
    const PageLayout& layout(int layer) const { return layers_[index(layer)].layout; }
    int count(int layer, int head) const { return head_at(layer, head).count; }
    int budget(int layer, int head) const { return head_at(layer, head).budget; }
    const std::byte* const* pages(int layer, int head) const {
        return head_at(layer, head).pages.data();
    }
    const StoreSettings& settings() const { return settings_; }

    // Budgets in entries of every KV head, all layers in order, in a share of `pool_pages` pages.
    // Heads that hold more evict at once; where the pool is the store's own, it has no more than
    // the share, and freed slabs go back to the system.
    void set_budgets(const std::vector<int>& budgets, std::size_t pool_pages,
                     const Protection& protection);

    // Before every micro-batch, which ends at position `newest`: pages for all that it can leave
    // behind. Nothing after it allocates.
    // recalls: recall() will be called for every head. n_echo: tokens behind them, of which only
    // the queries count; then n_tokens may be 0.
    void reserve(int n_tokens, std::int32_t newest, bool recalls, int n_echo = 0);
    const Staging& staging_area() const { return pool_->staging(); }
    StorePool& pool() { return *pool_; }
    // Where in the staging area its part of the next micro-batch begins: see Staging.
    void stage_at(std::size_t page) { first_staged_page_ = page; }
    // Gives the share back: nothing may be held. The next set_budgets() takes another one.
    void give_up_share();

    // The micro-batch's entries of one head, staged in the layout of the pool's pages: until the
    // next layer's, a single token until the one after that, or where a layer has several readers,
    // until the next micro-batch.
    std::byte* const* staging(int layer, int head) const {
        return staging_of(layers_[index(layer)], head);
    }

    // After the attention of the last reader: adds `observed` (count + n_staged values, stored
    // entries first; null where nothing was) to the importance, and keeps what the budget holds of
    // stored and staged entries. Called from ggml's threads, each head by one thread; workspace <
    // max_workers(). output_squares: the sum of the squared norms of the head's outputs, where it
    // measures.
    void commit(int layer, int head, int n_staged, const float* observed, float output_squares,
                int workspace) noexcept;
    void set_workers(int n_workers, const KernelTable& kernels);

    // Has every micro-batch from the next one on measure what each head would have lost, had it
    // kept so many entries beyond the protected ones; knots: ascending from 0, none: off.
    void measure_losses(const std::vector<int>& knots);
    bool measures() const { return !knots_.empty(); }
    // Of the last micro-batch that measured: sums of the scores of what is not kept, relative to
    // `output_squares` where scores are squared outputs; [KV head of all layers][knot].
    std::vector<double> losses() const;
    // For scores by expected attention: before a micro-batch that RoPE sees at `rope_position`, and
    // before commit(), with the queries of a KV head: row(token, query head of the group).
    void prepare_queries(std::int32_t rope_position, int n_tokens);
    template <typename Row>
    void add_queries(int layer, int head, int n_tokens, float scale, Row row) noexcept;

    // What is held now, its pages shared: between micro-batches, of a store that does not freeze.
    std::unique_ptr<Checkpoint> checkpoint();
    // Replaces what is held by what a checkpoint of the same pool has, and evicts as set_budgets()
    // does. ends: it is dropped, so that what nobody else owns need not be copied. False where the
    // pool has no room for the copies: then nothing is held, and the checkpoint is as it was.
    bool go_on_from(Checkpoint& from, bool ends);

    // Drops entries at positions >= position, frozen ones too.
    void truncate(std::int32_t position);
    // Entries that left the window of their layer are dropped before any other, and not counted as
    // evicted. Queries at this position or later see none of those that were.
    std::int32_t windows_whole_from() const { return whole_from_.load(std::memory_order_relaxed); }

    // --- cold storage ---
    bool freezes() const { return settings_.freezing.has_value(); }
    int recall_interval() const { return freezes() ? settings_.freezing->recall_interval : 0; }
    // Under a schedule, every query counts.
    int scoring_interval() const { return schedule_ ? 1 : kScoringInterval; }
    int neighbourhood() const { return schedule_ ? 0 : kNeighbourhood; }
    // Before a head is attended to: exchanges frozen entries that the queries need for the least
    // important ones that it holds. now: the newest position of the micro-batch.
    void recall(int layer, int head, int n_staged, const QueryRows& queries, std::int32_t now,
                int workspace) noexcept;
    // How many entries a head may hold more then.
    int most_recalled(int layer, int head) const { return most_recalled(head_at(layer, head)); }
    // Between micro-batches: everything that is held, in the order of its places.
    void freeze_all(std::int32_t now);
    // Restores what is asked for, page by page, as far as the budgets have room; returns
    // how many. forget: detections so far, too.
    std::size_t restore(const Asked& asked, std::int32_t now, bool forget);
    // Gives up what is frozen, and freezes no more: what storage failed to hold.
    void stop_freezing();
    std::size_t frozen() const;
    std::vector<std::int32_t> frozen_positions(int layer, int head) const;  // ascending
    // How often, so far; what was recalled was restored, too.
    std::size_t frozen_total() const {
        return total([](const Head& head) { return head.n_frozen; });
    }
    std::size_t restored_total() const {
        return total([](const Head& head) { return head.n_restored; });
    }
    std::size_t recalled_total() const {
        return total([](const Head& head) { return head.n_recalled; });
    }
    double cold_seconds() const {
        return 1e-9 * static_cast<double>(cold_nanoseconds_.load(std::memory_order_relaxed));
    }
    std::size_t cold_bytes() const;    // of pages in storage and open ones
    std::size_t sketch_bytes() const;  // of the keys in storage, always in memory
    std::size_t cold_file_bytes() const { return cold_ ? cold_->file_bytes() : 0; }
    const char* cold_failure() const { return cold_ ? cold_->failed() : nullptr; }

    std::vector<std::int32_t> positions(int layer, int head) const;  // ascending
    std::vector<float> importance(int layer, int head) const;        // of positions(), in order
    // visit(position) for every entry that a head holds, or has frozen, in no order.
    template <typename Visit>
    void over_held(int layer, int head, Visit visit) const;
    template <typename Visit>
    void over_frozen(int layer, int head, Visit visit) const;
    StoredRows rows(int layer, int head) const;

    // The entries of a head as bytes, frozen ones too: see head_state.cpp.
    std::size_t state_bytes(int layer, int head) const;
    void save_head(int layer, int head, std::byte* state) const;
    // Of a checkpoint.
    std::size_t state_bytes(const Checkpoint& from, int layer, int head) const;
    void save_head(const Checkpoint& from, int layer, int head, std::byte* state) const;
    int count(const Checkpoint& from, int layer, int head) const {
        return checked_head(from, number_of(layer, head)).count;
    }
    // What is wrong with the state of a sequence of `end` tokens, or nothing.
    std::string state_problem(int layer, int count, const std::byte* state, std::size_t size,
                              std::int32_t end) const;
    // Room for the states of all heads, so many entries in each, under budgets that set_budgets()
    // will be given before load_head(), which does not fail then. Throws where there is none, and
    // nothing that is held has changed.
    void begin_load(const std::vector<int>& counts, const std::vector<const std::byte*>& states,
                    const std::vector<int>& budgets);
    // Replaces a head's entries by those of a state without problems; changes the state where it
    // holds more than the head's budget, and evicts as set_budgets() does.
    void load_head(int layer, int head, int count, std::byte* state);
    void set_evicted(std::size_t entries) { evicted_.store(entries, std::memory_order_relaxed); }
    // Copies all pages that others own, too: before over_entries() changes them.
    void own_all();
    // visit(page, slot, position) for every stored entry of a layer's heads, frozen ones too.
    template <typename Visit>
    void over_entries(int layer, Visit visit) {
        for (Head& head : layers_[index(layer)].heads) {
            for (int i = 0; i < head.count; ++i) {
                const Slot slot = stored_slot(layers_[index(layer)], head, i);
                visit(slot.page, slot.index, layout(layer).positions(slot.page)[slot.index]);
            }
            if (head.cold) head.cold->rewrite(*kernels_, workspaces_[0].page_read.data(), visit);
        }
    }

    std::size_t entries() const;
    std::size_t evicted() const { return evicted_.load(std::memory_order_relaxed); }
    double eviction_seconds() const {
        return 1e-9 * static_cast<double>(eviction_nanoseconds_.load(std::memory_order_relaxed));
    }
    // Of its share of the pool.
    std::size_t budget_bytes() const { return share_pages_ * page_bytes(); }
    std::size_t used_bytes() const { return used_pages_ * page_bytes(); }
    std::size_t peak_bytes() const { return peak_pages_ * page_bytes(); }
    std::size_t mapped_bytes() const { return pool_->pages().mapped_bytes(); }  // of the pool
    std::size_t page_bytes() const { return pool_->pages().page_bytes(); }
    std::size_t staging_bytes() const { return pool_->staging().bytes(); }  // of the pool
    // Has visit(page) return where the page is from now on, for every page of the store.
    template <typename Visit>
    void move_pages(Visit visit) {
        for (Layer& layer : layers_)
            for (Head& head : layer.heads)
                for (std::byte*& page : head.pages) page = visit(page);
    }
    // Of all workers, and of importance besides the pages; not of staging.
    std::size_t workspace_bytes() const;

private:
    struct Head {
        std::vector<std::byte*> pages;
        int count = 0;
        int budget = 0;
        std::vector<float> losses;  // at knots_
        QueryStatistics queries{};  // of its group, where scores need them
        std::optional<ColdHead> cold{};
        std::vector<int> homes{};              // records of its entries, where they have one
        std::vector<Detections> detections{};  // of its entries, under a schedule
        // Pages that others may own, too, by page, and the importance of the entries in them, by
        // entry; empty where there are none. See head_sharing.cpp.
        std::vector<std::uint8_t> shared{};
        std::vector<float> importance{};
        int n_shared = 0;
        int upcoming = 0;  // entries that the next micro-batch can leave behind
        // How often that happened. (Not counted by all heads together: their threads would wait
        // for each other with every entry.)
        std::size_t n_frozen = 0;
        std::size_t n_restored = 0;
        std::size_t n_recalled = 0;
    };
    struct Layer {
        LayerShape shape;
        PageLayout layout;
        std::vector<Head> heads;
        std::size_t turns = 0;               // of its rope
        std::unique_ptr<ColdLayout> cold{};  // none where nothing of it is frozen
    };
    struct Incoming {  // an entry that recall brings back
        int home = ColdHead::kNone;
        const std::byte* rows = nullptr;  // as ColdHead::read() has them; null: in aside()
        ColdRecord record{};
    };
    struct Workspace {  // of one thread, for one commit
        std::vector<std::int32_t> positions;
        std::vector<float> scores;
        std::vector<float> scratch;
        std::vector<float> of_page;
        std::vector<float> mean;  // of expected queries
        std::vector<float> half_variance;
        std::vector<std::int32_t> order;
        std::vector<float> keys;  // [k_dim][kContest]
        std::vector<std::uint8_t> kept;
        // of recall
        std::vector<float> logits;
        std::vector<float> masses;        // of queries: log of the sum of e^(q.k)
        std::vector<float> active_needs;  // of the head's entries
        std::vector<std::int32_t> victims;
        std::vector<float> needs;        // of records
        std::vector<std::int32_t> best;  // records
        AlignedBytes page_read;
        AlignedBytes aside;
        int room = 0;  // entries that the head may take besides
        std::vector<Incoming> incoming;
    };
    struct Slot {
        std::byte* page;
        int index;
    };

    static std::size_t index(int i) { return static_cast<std::size_t>(i); }
    const Head& head_at(int layer, int head) const {
        return layers_.at(index(layer)).heads.at(index(head));
    }
    template <typename OfHead>
    std::size_t total(OfHead of_head) const {
        std::size_t sum = 0;
        for (const Layer& layer : layers_)
            for (const Head& head : layer.heads) sum += of_head(head);
        return sum;
    }
    static Slot stored_slot(const Layer& layer, const Head& head, int i) {
        return {head.pages[index(layer.layout.page_of(i))], layer.layout.slot_of(i)};
    }
    Slot staged_slot(const Layer& layer, int head, int i) const;
    // Importance of the stored or staged entries of a page, from entry `first` on.
    static float* importance_of(const Layer& layer, Head& head, std::byte* page, int first) {
        if (head.n_shared == 0 || first >= head.count) return layer.layout.importance(page);
        const bool shared = head.shared[index(layer.layout.page_of(first))] != 0;
        return shared ? head.importance.data() + first : layer.layout.importance(page);
    }
    static const float* importance_of(const Layer& layer, const Head& head, std::byte* page,
                                      int first) {
        return importance_of(layer, const_cast<Head&>(head), page, first);
    }
    static float stored_importance(const Layer& layer, const Head& head, int i) {
        const Slot slot = stored_slot(layer, head, i);
        return importance_of(layer, head, slot.page, i - slot.index)[slot.index];
    }
    std::byte* const* staging_of(const Layer& layer, int head) const {
        const auto number = static_cast<std::size_t>(&layer - layers_.data());
        return pool_->staging().row(number, head) + first_staged_page_;
    }

    template <typename Visit>
    void over_pages(const Layer& layer, const Head& head, int head_index, int n_staged,
                    Visit visit) const;
    void add_observed(const Layer& layer, Head& head, int head_index, int n_staged,
                      const float* observed) noexcept;
    std::int32_t gather(const Layer& layer, const Head& head, int head_index, int n_staged,
                        Workspace& workspace) const noexcept;
    float score_of(std::int32_t position, std::int32_t newest, float importance) const noexcept;
    void weigh_by_values(const Layer& layer, const Head& head, int head_index, int n_staged,
                         Workspace& workspace) const noexcept;
    void follow_queries(Layer& layer, std::size_t number);
    void expect(const Layer& layer, const Head& head, int head_index, int n_staged,
                Workspace& workspace) const noexcept;
    void add_softmax(int n, Workspace& workspace) const noexcept;
    void weigh_by_distinctness(const Layer& layer, const Head& head, int head_index, int total,
                               int keep, std::int32_t newest, Workspace& workspace) const noexcept;
    std::int32_t score(const Layer& layer, const Head& head, int head_index, int n_staged, int keep,
                       Workspace& workspace) const noexcept;
    // Until a query comes after `newest`.
    Protection protection_of(const Layer& layer, const Head& head, std::int32_t newest) const {
        Protection protection =
            settings_.own_windows ? settings_.protection.within(head.budget) : settings_.protection;
        protection.oldest = layer.shape.oldest_seen(newest + 1);
        return protection;
    }
    void measure(const Layer& layer, Head& head, int total, std::int32_t newest,
                 float output_squares, Workspace& workspace) const noexcept;
    bool leave_window(const Layer& layer, Head& head, int head_index, int n_staged,
                      std::int32_t newest, Workspace& workspace) noexcept;
    bool keep_from(const Layer& layer, Head& head, int head_index, int n_staged,
                   std::int32_t oldest, Workspace& workspace) noexcept;
    void note_left(const Layer& layer, std::int32_t position) noexcept;
    void append(const Layer& layer, Head& head, int head_index, int n_staged) noexcept;
    void take_in(const Layer& layer, Head& head, int head_index, int n_staged, std::int32_t newest,
                 float output_squares, Workspace& workspace) noexcept;
    void begin_entry(Head& head, int i) const noexcept {
        if (head.cold) head.homes[index(i)] = ColdHead::kNone;
        if (head.cold && schedule_) head.detections[index(i)] = Detections{};
    }
    void move_entry(Head& head, int from, int to) const noexcept {
        if (head.cold) head.homes[index(to)] = head.homes[index(from)];
        if (head.cold && schedule_) head.detections[index(to)] = head.detections[index(from)];
    }
    void apply(const Layer& layer, Head& head, int head_index, int n_staged,
               const std::uint8_t* kept) noexcept;
    void keep_best(const Layer& layer, Head& head, int head_index, int n_staged, int keep,
                   Workspace& workspace) noexcept;
    void keep_scored(const Layer& layer, Head& head, int head_index, int n_staged, int keep,
                     std::int32_t newest, Workspace& workspace) noexcept;
    std::size_t active_state_bytes(const Layer& layer, int count) const;
    std::size_t home_state_bytes(const Layer& layer, int count) const;
    std::string homes_problem(const Layer& layer, int count, const std::byte* state) const;
    void load_cold(const Layer& layer, Head& head, const std::byte* state, Head& loaded);
    void start_freezing();
    void size_workspaces();
    void size_for_recall(Workspace& workspace, std::size_t n) const;
    static int most_recalled(const Head& head);
    void size_for_frozen(const Layer& layer, std::size_t n_pages);
    int room_to_recall(const Layer& layer, const Head& head, int n_staged) const;
    int prepare_cold(const Layer& layer, Head& head, int n_tokens, std::int32_t newest);
    void size_homes(const Layer& layer, Head& head);
    bool in_page(int home, int page, const Layer& layer) const {
        return page != ColdHead::kNone && home != ColdHead::kNone &&
               layer.layout.page_of(home) == page;
    }
    std::byte* aside(const Layer& layer, int i, Workspace& workspace) const {
        return workspace.aside.data() + index(i / layer.layout.entries) * layer.layout.bytes;
    }
    Detections detections_of(const Head& head, int i) const noexcept;
    int freeze_entry(const Layer& layer, Head& head, int i, const Slot& slot, std::int32_t now,
                     std::int32_t due, Detections detections) noexcept;
    void freeze_victims(const Layer& layer, Head& head, int head_index, int total, std::int32_t now,
                        const std::uint8_t* kept) noexcept;
    void note_restored(const Layer& layer, Head& head, int i, const ColdRecord& record, int home,
                       std::int32_t now) noexcept;
    static auto is_due(std::int32_t now) {
        return [now](const ColdHead& cold, int i) { return cold.due(i, now); };
    }
    void restore_due(const Layer& layer, Head& head, std::int32_t newest,
                     Workspace& workspace) noexcept;
    template <typename Wants, typename Place>
    int restore_wanted(const Layer& layer, Head& head, std::int32_t now, Workspace& workspace,
                       Wants wants, Place place) noexcept;
    template <typename Wants>
    int append_restored(const Layer& layer, Head& head, std::int32_t now, Workspace& workspace,
                        Wants wants) noexcept;
    bool can_freeze(std::int32_t position, std::int32_t newest) const {
        return position >= settings_.protection.n_sinks && position <= newest - schedule_->window;
    }
    float detection_limit(const Layer& layer, const Head& head, int n_queries) const noexcept;
    void follow_schedule(const Layer& layer, Head& head, int head_index, int n_queries,
                         const float* observed, std::int32_t newest, Workspace& workspace) noexcept;
    void weigh_active(const Layer& layer, const Head& head, const QueryRows& queries,
                      Workspace& workspace) const noexcept;
    float least_share(const Head& head) const noexcept;
    void weigh_frozen(const Layer& layer, const Head& head, const QueryRows& queries,
                      Workspace& workspace) const noexcept;
    int find_victims(const Layer& layer, const Head& head, std::int32_t newest,
                     Workspace& workspace) const noexcept;
    int take_best(const Layer& layer, Head& head, float least, std::int32_t newest,
                  Workspace& workspace) const noexcept;
    int find_rows(const Layer& layer, Head& head, int n, Workspace& workspace) const noexcept;
    void exchange(const Layer& layer, Head& head, int n_incoming, std::int32_t now,
                  Workspace& workspace) noexcept;
    void give_place(const Layer& layer, Head& head, int victim, int next, int n_incoming,
                    std::int32_t now, Workspace& workspace) noexcept;
    void share_pages(const Layer& layer, Head& head);
    void own_page(const Layer& layer, Head& head, int number);
    void own_pages(const Layer& layer, Head& head, std::size_t first);
    static void forget_if_alone(Head& head) noexcept;
    std::size_t foreign_pages(const Head& head, std::size_t first, std::size_t last) const;
    static std::size_t first_written(const Layer& layer, const Head& head, int n_tokens);
    static Head head_of(const Checkpoint::Head& from);
    const Checkpoint::Head& checked_head(const Checkpoint& from, std::size_t number) const;
    std::size_t number_of(int layer, int head) const;
    bool make_room_for(const Checkpoint& from, bool ends);
    void keep_budgets();
    std::size_t pages_to_read(int n_tokens) const;
    std::size_t copies_to_evict(const std::vector<int>& budgets) const;
    std::size_t copies_to_truncate(std::int32_t position);
    void mark_before(const Layer& layer, const Head& head, std::int32_t position,
                     Workspace& workspace) const noexcept;
    std::size_t foreign_holes(const Layer& layer, const Head& head,
                              const std::uint8_t* kept) const noexcept;
    void save_active(const Layer& layer, const Head& head, std::byte* state) const;
    void grow_pages(const Layer& layer, Head& head, int entries);
    void drop_pages(const Layer& layer, Head& head, int entries);

    StoreSettings settings_;
    std::vector<int> knots_;
    const KernelTable* kernels_ = nullptr;
    std::vector<Layer> layers_;
    std::shared_ptr<StorePool> pool_;
    std::size_t share_pages_ = 0;
    std::size_t used_pages_ = 0;
    std::size_t peak_pages_ = 0;
    std::size_t first_staged_page_ = 0;
    std::vector<Workspace> workspaces_;
    int most_loaded_ = 0;             // entries of a head in the states that are being loaded
    std::vector<TurnsBack> turns_;    // one for every kind of rope
    std::int32_t rope_position_ = 0;  // of the micro-batch
    std::int32_t newest_ = 0;         // the position at its end
    bool single_query_ = false;       // it has no more than one
    std::unique_ptr<ColdStorage> cold_;
    std::optional<FreezeSchedule> schedule_;
    std::atomic<std::int64_t> cold_nanoseconds_{0};
    std::atomic<std::size_t> evicted_{0};
    std::atomic<std::int32_t> whole_from_{0};
    std::atomic<std::int64_t> eviction_nanoseconds_{0};
};

// Visits the pages of a head's stored entries, then those of its staged ones: page, how many
// entries of it count, and how many came before.
template <typename Visit>
void HeadStore::over_pages(const Layer& layer, const Head& head, int head_index, int n_staged,
                           Visit visit) const {
    const int per_page = layer.layout.entries;
    for (int first = 0; first < head.count; first += per_page)
        visit(head.pages[index(first / per_page)], std::min(per_page, head.count - first), first);
    for (int first = 0; first < n_staged; first += per_page)
        visit(staging_of(layer, head_index)[first / per_page], std::min(per_page, n_staged - first),
              head.count + first);
}

template <typename Visit>
void HeadStore::over_held(int layer_index, int head_index, Visit visit) const {
    const Layer& layer = layers_.at(index(layer_index));
    over_pages(layer, head_at(layer_index, head_index), head_index, 0,
               [&](const std::byte* page, int n, int) {
                   const std::int32_t* positions = layer.layout.positions(page);
                   for (int i = 0; i < n; ++i) visit(positions[i]);
               });
}

template <typename Visit>
void HeadStore::over_frozen(int layer_index, int head_index, Visit visit) const {
    const Head& head = head_at(layer_index, head_index);
    for (int i = 0; head.cold && i < head.cold->n_records(); ++i)
        if (head.cold->frozen(i)) visit(head.cold->position(i));
}

template <typename Row>
void HeadStore::add_queries(int layer_index, int head_index, int n_tokens, float scale,
                            Row row) noexcept {
    const ImportanceSettings& importance = settings_.importance;
    if (importance.measure().evidence != Evidence::expectation) return;
    const Layer& layer = layers_[index(layer_index)];
    QueryStatistics& queries = layers_[index(layer_index)].heads[index(head_index)].queries;
    const int group = layer.shape.n_head / layer.shape.n_head_kv;
    queries.start(decay_factor(importance.decay, n_tokens), rope_position_ + n_tokens - 1);
    float turned[kMaxHeadDim];
    for (int token = 0; token < n_tokens; ++token) {
        const float weight = decay_factor(importance.decay, n_tokens - 1 - token);
        queries.count(weight);
        for (int g = 0; g < group; ++g) {
            const float* query = row(token, g);
            for (int d = 0; d < layer.shape.k_dim; ++d) turned[d] = query[d] * scale;
            turns_[layer.turns].turn_back(token, turned);
            queries.add(g, turned, weight);
        }
    }
    queries.finish();
}

}  // namespace entropykv
