// Keeps the entries of one sequence where the weights are: K and V lie in rows on the device of
// their layer, and the host decides who stays. It does so with the same store as the CPU, whose
// entries are small here: the "ledger" holds positions, importance, and instead of K and V the
// number of an entry's row and the norm of its value.
//
// A single token in llama.cpp's own graph, in order of time ("findings": what queries gave, norms
// and predictions, which only the devices know):
// - reserve() makes room in the ledger, unless the decision about the token before has made it.
// - begin_singles() writes inputs to the devices, and plans: does an eviction need findings first?
// - Nodes of the graph are changed. With the last attention node, before the devices have computed
//   it, a background thread begins to decide if the eviction needs none: it tells the ledger late
//   findings about earlier tokens, commits this token, and makes room for the next one.
// - commit_steps() waits for that thread, begins to move rows, and begins to look up what the
//   ledger will need. These are late findings: the next decision waits for them, so the ledger has
//   them one token late at the earliest.
// If findings are needed first, commit_steps() looks them up, waits for them, and then commits; for
// several tokens in that graph, the thread prepares this. Between two nodes, commit_steps() reads
// all findings. device_states.cpp has what is saved and loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "llama/device_attention.hpp"
#include "llama/device_layer.hpp"
#include "store/head_store.hpp"

namespace entropykv {

// Says what the store must know of a layer in llama.cpp's graph.
struct DeviceLayerSource {
    LayerShape shape;
    ggml_backend_buffer_type_t memory;  // where llama.cpp has the layer's cache
    bool is_apart;  // whether llama.cpp computes the attention on another device than that of the
                    // cache
    DeviceParams params;  // parameters of the attention node
    bool has_sinks;
    int slots;           // how many nodes can become others before an attention node: see NodeOrder
    bool dense_queries;  // whether the queries of one token lie behind those of the token before
    RopeParams rope;     // rotates the keys of the layer
    std::vector<float> predictor;  // [KV head][feature], see features.hpp; empty: none
};

class DeviceStore {
public:
    // budgets: entries by KV head of all layers; importance, protection, max_tokens and max_entries
    // of `settings` are used, and its type is that of K and V. The CPU serves layers whose device
    // cannot compute their attention: see Devices::on_host(), which the first store of `devices`,
    // one with rows, finds out for all. live: whether it has rows from the start, and not only
    // after acquire(). Throws std::invalid_argument for a measure that needs keys on the host and
    // for a predictor of other features, std::runtime_error if the CPU cannot compute attention
    // either, std::bad_alloc if a device has no memory.
    DeviceStore(std::shared_ptr<Devices> devices, const std::vector<DeviceLayerSource>& layers,
                const StoreSettings& settings, const std::vector<int>& budgets, bool live = true);
    ~DeviceStore() { release(); }
    DeviceStore(const DeviceStore&) = delete;
    DeviceStore& operator=(const DeviceStore&) = delete;

    // Must be called for every micro-batch that reads tokens of this sequence; `position` is that
    // of the sequence's first token, which RoPE sees at `rope_position`, and `first` its place in
    // the micro-batch. The last n_drafts tokens are drafts. see_all: every token attends to all
    // n_tokens tokens, also to later ones.
    void reserve(int n_tokens, std::int32_t position, std::int32_t rope_position, int first = 0,
                 int n_drafts = 0, bool see_all = false);
    // begin_singles() or begin() must be called next, before the first node is computed. The first
    // one is for single tokens that llama.cpp's own graph reads, of one sequence or of several,
    // which must be in runs of neighbouring places and in the order of the micro-batch: most_runs()
    // says in how many, at most; 0: not at all. Both throw as add_attention() does.
    bool can_read_single() const { return step_.n_tokens == 1 && can_be_in_graph_; }
    int most_runs() const { return most_runs_; }
    bool shares_places(const DeviceStore& other) const { return places_ == other.places_; }
    bool is_beside(const DeviceStore& other) const {
        return shares_places(other) && place_ == other.place_ + 1;
    }
    static void begin_singles(const std::vector<DeviceStore*>& stores, int n_runs);
    // alone: the micro-batch has no tokens of other sequences. Returns whether llama.cpp's own
    // graph computes attention: then change_write() and attention_of() must replace its nodes;
    // otherwise, add_attention() must be called.
    bool begin(bool alone);
    // Must be called after begin_singles() or begin(), before a node is changed, unless all nodes
    // are replaced as in the step before, which is so if the sequences and their layout() are the
    // same. layout() changes if this store gets other rows, or the masks another layout.
    void begin_nodes();
    std::size_t layout() const;
    // Returns how many drafts may follow the token at a position, at most `wanted`. None of their
    // queries may count towards importance, since those of wrong drafts could not be taken out, and
    // nothing may be evicted before the last of them, since all attend at once.
    int most_drafts(std::int32_t position, int wanted) const;
    // Adds to a graph of the layer's device the attention of the next layer of the model that reads
    // a layer's K and V. Throws as DeviceAttention does.
    void add_attention(int layer, const DeviceNode& node, ggml_context* context,
                       ggml_cgraph* graph);
    Device& device_of(int layer) const;
    // Change nodes of llama.cpp's graph: see DeviceAttention.
    void change_write(int layer, bool keys, ggml_tensor* node, NodeChanges& changes);
    std::vector<ggml_tensor*> attention_of(int layer, const DeviceNode& node, int n_sequences);
    std::vector<ggml_tensor*> upkeep_of(int layer, const DeviceNode& node, bool& writes_masks);
    // Must be called for every attention node that was changed. Returns whether it was the last
    // one: the graph needs nothing more of the heads then, and decide_meanwhile() can be called.
    bool note_changed(int layer);
    // Begins, in a background thread, to commit steps that the devices compute, or to prepare what
    // must be looked up for several tokens first.
    static void decide_meanwhile(const std::vector<DeviceStore*>& stores);
    // Must be called after every micro-batch that was read: commits its entries in all layers,
    // which evicts what budgets cannot hold. Steps that were committed stay as they are.
    static void commit_steps(const std::vector<DeviceStore*>& stores);
    void commit_step() { commit_steps({this}); }
    bool has_drafts() const { return step_.n_drafts > 0; }
    // Commits the token before the drafts and the first n_accepted drafts, one by one; must follow
    // commit_step() after a micro-batch with drafts, of which that commits no token.
    void settle_drafts(int n_accepted);

    // Completes the ledger with all that the devices know of its entries: about single tokens that
    // llama.cpp's own graph has read, it is not told at once.
    void complete_ledger();

    // Sets the budgets of all stores of a context; heads that hold more evict. If there are not
    // rows enough, those of all places are allocated anew, and all entries are kept on the host
    // meanwhile. Throws std::bad_alloc if the devices have no memory for them; then the stores are
    // as they were.
    static void resize(const std::vector<DeviceStore*>& stores, const std::vector<int>& budgets,
                       const Protection& protection);
    // Drops the entries at positions >= position. Throws std::invalid_argument for a negative
    // position.
    void truncate(std::int32_t position);

    // Returns why keys cannot be moved to other positions by these RoPEs, one for each layer, or an
    // empty string.
    std::string rotation_problem(const std::vector<RopeParams>& ropes);
    // Moves keys to other positions, as rebase() of store/rope.hpp does.
    void rebase(const std::vector<RopeParams>& ropes, int n_sinks, int old_shift, int new_shift);

    // Leaves the place; the rows of all places are freed when the last store leaves. Nothing may
    // be read or saved until acquire(). A device may be gone when the garbage collector ends the
    // store, so closing a session must not wait for that.
    void release() noexcept;
    // Takes a place, with rows for the budgets that are set; the store is empty then. The rows of
    // all places are allocated together, anew if the place is in use or its rows are too few.
    // Throws std::bad_alloc.
    void acquire(int place);

    // Returns how many layers there are; 0 after release().
    int n_layers() const { return static_cast<int>(layers_.size()); }
    const HeadStore& ledger() const { return ledger_; }
    std::size_t entries() const { return ledger_.entries(); }
    std::size_t evicted() const { return ledger_.evicted(); }
    void set_evicted(std::size_t n) { ledger_.components().common.evicted = n; }
    int budget(int layer, int head) const { return ledger_.head(layer, head).budget(); }
    int count(int layer, int head) const { return ledger_.head(layer, head).count(); }
    std::vector<std::int32_t> positions(int layer, int head) const {
        return positions_of(ledger_.head(layer, head));
    }
    double eviction_seconds() const {
        return 1e-9 * static_cast<double>(ledger_.components().common.eviction_nanoseconds.load());
    }

    // Count bytes on the devices: of the entries that budgets allow, of the entries that are held,
    // of the most that were held, and of the rows that a micro-batch and the padding of groups
    // take.
    std::size_t budget_bytes() const;
    std::size_t used_bytes() const;
    std::size_t peak_bytes() const { return peak_; }
    std::size_t staging_bytes() const;
    // Counts working memory, on devices and on the host, with the ledger, but without that of
    // Devices, which other stores may share.
    std::size_t scratch_bytes() const;
    // Returns the bytes of K, V and working memory, with that of Devices, by the names of the
    // devices.
    std::vector<std::pair<std::string, std::size_t>> device_bytes() const;

    // Save and load KV heads in the format of the headwise store: see head_states.hpp. A layer's
    // states have state_bytes() of its heads.
    std::size_t state_bytes(int layer, int head) const;
    void save_layer(int layer, const std::vector<std::byte*>& states);
    std::string state_problem(int layer, int count, const std::byte* state, std::size_t size,
                              std::int32_t end) const;
    // Replaces the entries of all heads by states that state_problem() accepts, and evicts down to
    // the budgets.
    void load(const std::vector<int>& counts, const std::vector<std::byte*>& states);

private:
    struct Layer {
        DeviceLayer rows;
        DeviceAttention* device;
        int number;         // number of the layer in its DeviceAttention
        PageLayout layout;  // of the headwise store's pages, for saved states
        int read = 0;       // how many layers of the model have attended in this step
    };

    void add_layer(const DeviceLayerSource& source);
    bool has_rows_for(const std::vector<int>& budgets) const;
    void set_budgets(const std::vector<int>& budgets, const Protection& protection);
    static void grow(const std::vector<DeviceStore*>& stores, const std::vector<int>& budgets,
                     const Protection& protection);
    void place_layers();
    std::shared_ptr<DevicePlaces> make_places() const;
    void take(int place);
    std::string unsupported_in(const Layer& layer) const;
    std::size_t pages_of(const std::vector<int>& budgets) const;
    std::vector<int> budgets() const;
    std::vector<std::byte> state_of_ledger(int layer, int count, const std::byte* state) const;
    void load_rows(int layer, const std::vector<std::byte*>& states);
    void make_room(int n_tokens, std::int32_t position);
    void commit(int layer, int head, bool found, int worker);
    bool protects_newest(int n) const;
    void commit_by_parts(bool prepared);
    void stage(int layer, int head, int begin, int n_staged, bool found);
    bool evicts() const;
    void plan_commit();
    void decide() noexcept;
    void prepare_look_up();
    // Tell whether committing this step needs findings of the devices, and whether these are
    // prepared while the devices compute: not for single tokens, because earlier findings must be
    // read first.
    bool looks_up() const { return plan_.due || step_.observing; }
    bool prepares_look_up() const { return looks_up() && step_.n_tokens > 1; }
    bool end_background();
    bool take_decisions();
    void end_decisions();
    void commit_alone();
    void plan_late_look_up();
    static void look_up_late(const std::vector<DeviceStore*>& stores);
    void add_late_findings();
    int n_summed() const { return devices_.empty() ? 0 : devices_.front()->n_summed(); }
    void forget_sums() noexcept;
    void forget_unknown() noexcept;
    bool reads_values() const;
    int most_unknown() const;
    void complete_entries(int layer, int head, int n_later);
    // Brings the rows of a head into the order of the ledger, by moves where that has changed.
    void follow_ledger(int layer, int head);
    void take_order_of_ledger(int layer, int head);
    void move_rows() { move_rows({this}); }
    static void move_rows(const std::vector<DeviceStore*>& stores);
    // Calls visit(layer, head) for the KV heads of all layers in order.
    template <typename Visit>
    void for_each_head(Visit visit) const {
        for (int layer = 0; layer < n_layers(); ++layer)
            for (int head = 0; head < ledger_.shape(layer).n_head_kv; ++head) visit(layer, head);
    }
    // Calls visit(layer, head, worker) for the KV heads of all layers in any order, with several
    // workers if much is to be done.
    template <typename Visit>
    void for_each_head_at_once(bool much, Visit visit) {
        for_each_head_of(much, [](int) { return true; }, visit);
    }
    // Does what for_each_head_at_once() does for the layers of which is_meant(layer) is true.
    template <typename IsMeant, typename Visit>
    void for_each_head_of(bool much, IsMeant is_meant, Visit visit);
    DeviceLayer& rows(int layer) { return layers_[PageLayout::index(layer)].rows; }
    const DeviceLayer& rows(int layer) const { return layers_[PageLayout::index(layer)].rows; }
    DeviceHead& head(int layer, int head) { return rows(layer).heads()[PageLayout::index(head)]; }
    void check_ropes(const std::vector<RopeParams>& ropes) const;

    std::shared_ptr<Devices> shared_;
    std::vector<DeviceLayerSource> sources_;
    std::shared_ptr<DevicePlaces> places_;
    int place_ = 0;
    std::size_t taken_ = 0;  // from Devices::note_taken(), as it took its place
    std::vector<int> most_;  // the budgets that rows are allocated for
    HeadStore ledger_;
    KvType type_;
    std::vector<std::unique_ptr<DeviceAttention>> devices_;
    std::vector<Layer> layers_;
    DeviceStep step_;
    bool can_be_in_graph_ = false;  // whether single tokens can be read in llama.cpp's graph
    int most_runs_ = 0;
    bool several_can_be_in_graph_ = false;  // whether several tokens can, if heads are alike
    bool heads_can_be_alike_ = false;       // see DeviceStep::alike
    int n_changed_ = 0;                     // attention nodes that were changed in this step
    int n_readers_ = 0;                     // attention nodes of the model
    UnknownTokens unknown_;                 // the newest tokens, without findings in the ledger
    // Says how a step in llama.cpp's own graph is committed.
    struct CommitPlan {
        UnknownTokens unknown;   // what is unknown once the step has been read
        bool due = false;        // whether this must be looked up before the step is committed
        bool evicting = false;   // whether the step exceeds the budget of any KV head
        bool meanwhile = false;  // whether nothing that the device finds out is needed
    };
    CommitPlan plan_;
    bool is_committed_ = true;
    std::int32_t next_ = -1;  // the position of a single token for which there is room; -1: none
    bool deciding_ = false;   // whether decide() was begun while devices compute
    std::exception_ptr decision_error_;
    // Describes what the devices look up while the next token is read; the ledger gets it later.
    struct Late {
        bool sums = false;     // whether what single tokens gave is read
        bool unknown = false;  // whether the newest entries are looked up

        explicit operator bool() const { return sums || unknown; }
    };
    Late late_;
    std::size_t peak_ = 0;
};

}  // namespace entropykv
