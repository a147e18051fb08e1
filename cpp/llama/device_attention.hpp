// Computes the attention of the layers of one device, each as a graph of ggml's own operations
// between two nodes of llama.cpp's graph: it copies K and V of the micro-batch to the rows of their
// KV heads, attends to these rows, and sums up what the queries gave to each of them. The host
// writes once before a step what the graphs of all layers need, and reads once after it what they
// have found out.
// Most steps compute attention in llama.cpp's own graph, so that its device need not wait between
// layers: nodes of the graph become others, which write to and read our rows. Those are steps of a
// single token, and steps of several tokens if all KV heads of a layer hide the same rows.
// DeviceAttention is in three files: device_attention.cpp has its memory, inputs and findings, and
// begins attention between two nodes; device_in_graph.cpp has steps in llama.cpp's own graph, and
// findings that are looked up after them; device_moves.cpp moves rows, and turns keys.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "decide/eviction.hpp"
#include "decide/features.hpp"
#include "decide/importance.hpp"
#include "decide/rope_params.hpp"
#include "llama/device.hpp"
#include "llama/device_layer.hpp"
#include "llama/device_relay.hpp"
#include "llama/node_changes.hpp"

namespace entropykv {

struct DeviceStep {
    int n_tokens = 0;
    std::int32_t position = 0;       // position of the first token
    bool observing = false;          // whether the step's queries count towards importance
    int first = 0;                   // where the step's tokens begin in the micro-batch
    int n_drafts = 0;                // how many tokens, the last ones, are drafts
    std::int32_t rope_position = 0;  // where RoPE sees the first token
    bool see_all = false;            // whether tokens attend to later ones, too
    bool in_graph = false;           // whether llama.cpp's own graph computes the attention
    // True if all KV heads of a layer hide the same rows from a token, and so do all layers with
    // equally many rows. It is not needed for a single token in llama.cpp's own graph.
    bool alike = false;
    int n_together = 1;  // how many single tokens, of as many sequences, are read together

    bool is_single_in_graph() const { return in_graph && n_tokens == 1; }
    // Returns the last token of the step that a token attends to.
    int last_seen(int token) const { return see_all ? n_tokens - 1 : token; }
};

// The most single tokens of which the host may know nothing (see UnknownTokens): as many as an
// eviction makes room for at most.
constexpr int kMostUnknown = kMostDecodeRoom;

// Refers to single tokens that were read in llama.cpp's own graph, one after another, and about
// which the host knows nothing yet.
struct UnknownTokens {
    int n = 0;
    int n_staged = 0;  // how many tokens, the last ones, are no entries yet; DeviceHead::unknown
                       // has the rows of the others
    std::int32_t rope_position = 0;  // where RoPE saw the first one
};

// Says what the scores of a layer's new entries are predicted by: see store/predictor.hpp. The
// device computes all products, and the host adds the logarithms of the norms.
struct DevicePredictor {
    RopeParams rope;  // rotates the stored keys of the layer
    FeatureShape shape{};
    std::vector<float> weights;  // [KV head][feature]; empty: nothing is predicted

    explicit operator bool() const { return !weights.empty(); }
    // Returns some of the weights of each KV head, [KV head][n]: those of n features from `at` on.
    std::vector<float> part(int at, int n) const;
    // Returns the predicted share from the sum of all products of a KV head's entry, and from the
    // squared norms of its key and its value.
    float share(int head, float sum, float key_squares, float value_squares) const;
};

// Holds the op_params of GGML_OP_FLASH_ATTN_EXT.
using DeviceParams = std::array<std::int32_t, GGML_MAX_OP_PARAMS / sizeof(std::int32_t)>;

// Refers to the layers [first, end) of a device.
struct LayerRange {
    std::size_t first = 0;
    std::size_t end = 0;

    bool has(int number) const {
        const auto layer = static_cast<std::size_t>(number);
        return layer >= first && layer < end;
    }
};

class StepInput;
struct SingleSteps;

// Holds the layers of one sequence on one device.
class DeviceAttention {
public:
    // The device and the settings must outlive this object.
    DeviceAttention(Device& device, const ImportanceSettings& importance)
        : device_(device), importance_(importance) {}
    DeviceAttention(const DeviceAttention&) = delete;
    DeviceAttention& operator=(const DeviceAttention&) = delete;

    // Adds a layer, which must outlive this object, and returns its number here. slots: how many
    // nodes of llama.cpp's graph that compute nothing can be replaced for each of its readers.
    int add(DeviceLayer& layer, const DeviceParams& params, bool has_sinks,
            const DevicePredictor& predictor, int slots);
    // Must be called once, after all layers were added. in_graph: there will be steps of single
    // tokens in llama.cpp's own graph. several: also steps of several tokens. alike: there will be
    // steps with heads that are alike. singles: shared with the other sequences of the device, and
    // outlives this object. Throws std::bad_alloc.
    void allocate(int max_tokens, bool in_graph, bool several, bool alike, SingleSteps& singles);
    // Tells whether nodes of llama.cpp's graph can compute a layer for a single token.
    bool can_be_in_graph(int layer) const;
    // Returns in how many nodes of llama.cpp's graph, at most, single tokens of several sequences
    // can attend to a layer; 0: in none.
    int most_runs(int layer) const;
    // Tells whether nodes of llama.cpp's graph can compute all layers for up to max_tokens tokens,
    // if heads are alike.
    bool can_read_several_in_graph(int max_tokens) const;
    // Tell whether heads can be alike (see DeviceStep::alike) for up to max_tokens tokens, and
    // whether they are now.
    bool can_be_alike(int max_tokens) const;
    bool are_alike() const;
    // Returns the name of an operation that the device cannot compute for a layer, or an empty
    // string.
    std::string unsupported(int layer, int n_tokens);
    // Returns the name of an operation that the device needs to move a layer's keys to other
    // positions and cannot compute, or an empty string.
    std::string unsupported_rotation(int layer, const RopeParams& rope);

    // Writes to the device what the layers' graphs need for a step, for which all heads have chosen
    // their rows. Throws as add_attention() does.
    void begin_step(const DeviceStep& step);
    // Sizes masks so that they have room for the rows that single tokens of sequences see: at least
    // one sequence, and all on one device. Must be called before begin_singles().
    static void fit_masks(const std::vector<DeviceAttention*>& sequences);
    // Does what begin_step() does for single tokens of several sequences in llama.cpp's own graph,
    // which attends in n_runs nodes for them. `sequences` are in the order of the micro-batch.
    static void begin_singles(const std::vector<DeviceAttention*>& sequences, int n_runs);
    void set_step(const DeviceStep& step) { step_ = step; }
    // Makes room for the operations that replace nodes of llama.cpp's graph in this step. If the
    // layout of masks is the same as before, steps of single tokens replace nodes by the same
    // operations.
    void begin_nodes();
    std::size_t layout() const { return static_cast<std::size_t>(layout_); }
    // Changes a node of llama.cpp's graph that writes K or V of a layer, for all sequences of the
    // step. Only for steps whose attention that graph computes.
    void change_write(int layer, bool keys, ggml_tensor* node, NodeChanges& changes);
    // Returns the operations that attend for one of a layer's readers, with the tokens of this
    // sequence and of those in the next places, n_sequences in all. They replace the attention node
    // of the reader and nodes that compute nothing.
    std::vector<ggml_tensor*> attention_of(int layer, int reader, const DeviceNode& node,
                                           int n_sequences);
    // Returns up to two operations that replace nodes that compute nothing, for all sequences of
    // the step. If writes_masks becomes true, the first one writes the masks of single tokens, and
    // must be computed before anything attends. The other one copies the queries of the reader, if
    // they are kept for look_up().
    std::vector<ggml_tensor*> upkeep_of(int layer, int reader, const DeviceNode& node,
                                        bool& writes_masks);
    // Prepares look_up() while the device computes the step: findings about its queries and about
    // unknown tokens, in about n_parts parts of the layers, so that the host can decide about one
    // part while the device computes the next. Throws std::bad_alloc.
    void prepare_look_up(const UnknownTokens& unknown, bool observed, int n_parts);
    // Begins to compute what prepare_look_up() has prepared. Throws as add_attention() does.
    void look_up();
    // Waits for the next part, lets the device begin the one after it, and returns the part's
    // layers; an empty range after the last part. Throws as add_attention() does.
    LayerRange next_part();
    // Says what is looked up of a sequence. observed: whether what the query of its single token
    // gave is added to the sums; reads_sums: whether the host gets these.
    struct LookUp {
        DeviceAttention* sequence;
        UnknownTokens unknown;
        bool observed;
        bool reads_sums;
    };
    // Begins all look-ups, at least one, of sequences on one device. The results are complete after
    // Device::wait(). Throws as add_attention() does.
    static void look_up_all(const std::vector<LookUp>& all);
    // Adds to a graph the attention of one reader of a layer; the first reader also writes K and V.
    // Throws std::runtime_error if the device fails, std::bad_alloc if it has no memory.
    void add_attention(int layer, int reader, const DeviceNode& node, ggml_context* context,
                       ggml_cgraph* graph);
    // Reads from the device what its layers have found out in a step.
    void end_step();
    // Returns for how many tokens end_step() has read findings.
    int n_found() const { return n_found_; }
    // Return what queries gave to the rows of a head, and the squared norms of V of the n_found()
    // tokens; null if that was not asked for. Of single tokens in llama.cpp's own graph,
    // observed() is the sum over the n_summed() ones that were observed since forget_sums(), as
    // HeadStore::add_sum() takes it.
    const float* observed(int layer, int head) const;
    const float* value_squares(int layer, int head) const;
    // Returns the share of attention that is predicted for one of the n_found() tokens; the least
    // one if the layer has no predictor.
    float predicted(int layer, int head, int token) const;
    int n_summed() const { return n_summed_; }
    void forget_sums() { n_summed_ = 0; }

    // Begins to move rows of all layers of sequences that share places, as their heads say; nothing
    // may read them before Device::wait(). Throws as add_attention() does.
    static void move_rows(const std::vector<DeviceAttention*>& sequences);
    // Turns all keys of a layer by as many positions as by_row[KV head][row] says. Throws as
    // add_attention() does.
    void rotate(int layer, const RopeParams& rope,
                const std::vector<std::vector<std::int32_t>>& by_row);
    // Must be called if rows of a layer got entries by anything but a step.
    void forget_positions(int layer);

    Device& device() const { return device_; }
    // Returns the bytes of inputs and findings, without the working memory of the device.
    std::size_t scratch_bytes() const;

private:
    // Holds offsets in the memories of a layer, in bytes; those of input and findings are of this
    // step.
    struct Places {
        std::size_t rows;           // [KV head][token], i64: where K and V of the tokens go
        std::size_t changed;        // [n_changed], i64: which positions change
        std::size_t new_positions;  // [n_changed], f32
        std::size_t seen_rows;      // [KV head][token], f32: the last row that a query sees
        std::size_t oldest;         // [token], f32: the oldest position that a query sees
        std::size_t mask;           // mask of a step with heads that are alike, f16
        std::size_t slopes;         // [query head], f32: those of ALiBi
        std::size_t positions;      // [position of all heads], f32
        std::size_t findings;       // where the findings of the layer begin
        // f32 for every position of all heads: the attention that the queries of a chunk gave to
        // the entry there.
        std::size_t observed;
        std::size_t sums;           // [row of all heads], f32: what single tokens gave
        std::size_t value_squares;  // [KV head][token], f32
        std::size_t key_squares;    // [KV head][token], f32
        std::size_t predictions;    // [KV head][token], f32: the products of a prediction
        std::size_t queries;        // [reader][query head][token][k_dim], f32: kept ones
        std::size_t sinks;          // [reader][KV head][query head], f32, each KV head's aligned
        // Offsets in the memory of the predictors, by KV head: of the weights of the first values
        // of a key if RoPE leaves them out, of its other values, of the norms of pairs, and of V;
        // and of the factors of the pairs in the layer's RoPE.
        std::size_t first_weights;
        std::size_t turned_weights;
        std::size_t norm_weights;
        std::size_t value_weights;
        std::size_t factors;
        int n_changed;
    };
    struct Served {
        DeviceLayer* layer;
        DeviceParams params;
        std::vector<float> slopes;  // by query head; empty: no ALiBi
        bool has_sinks;
        DevicePredictor predictor;
        int slots;
        std::size_t alike = 0;            // index in alike_
        std::int32_t oldest_seen = 0;     // oldest position that the token of the masks sees
        bool positions_known = false;     // whether the device has the positions
        std::vector<char> sinks_known{};  // whether the device has the sinks, by reader
        Places places{};
    };
    // Describes layers whose KV heads have equally many rows: in a step with heads that are alike,
    // they have one input and one mask together.
    struct Alike {
        const Served* first;
        std::size_t mask;  // offset of the mask
        // Say which mask is stored there, so that it can be used again.
        int count = -1;
        int n_tokens = 0;
        bool see_all = false;
    };
    // Holds a part of what is looked up, which the device has yet to compute.
    struct Part {
        std::unique_ptr<ggml_context, FreeContext> context;
        ggml_cgraph* graph = nullptr;
        LayerRange layers;
    };
    friend class DeviceGraph;

    void add_inputs(Served& served, StepInput& input);
    void add_changed_positions(Served& served, StepInput& input);
    void place_findings(int n_tokens, bool observed);
    void place_predictors();
    void place_sinks();
    std::size_t sinks_bytes(const Served& served) const;
    void keep_sinks(Served& served, int reader, const ggml_tensor* sinks);
    void place_outside();
    void place_sums();
    void begin_read_of_sums(std::size_t first, std::size_t end);
    bool keeps_places() const;
    ggml_tensor* outside_of(ggml_context* context, std::int64_t n_rows, std::int64_t n) const;
    void place_ones();
    void lay_out_positions(bool packed);
    void allocate_for_graph();
    void allocate_singles();
    bool multiplies_apart();
    void allocate_masks_of_alike();
    std::size_t mask_bytes(const Served& served, int max_tokens) const;
    template <typename Visit>
    void for_each_alike(Visit visit) const;
    std::size_t query_bytes(const Served& served, int n_observed) const;
    std::vector<float> positions_of_tokens() const;
    std::vector<std::int32_t> turns_of_tokens() const;
    int looked_up_tokens() const;
    // Returns how many of n tokens are observed, the last ones.
    int observed_of(int n) const { return std::min(n, importance_.observation_window); }
    std::size_t most_changed(const LayerShape& shape) const;
    bool heads_are_aligned(const LayerShape& shape) const;
    bool results_fit_nodes(const Served& served, int n_tokens) const;
    bool computes_in_node(const Served& served, int n_tokens, int third, int fourth) const;
    void begin_alike();
    bool writes_masks_in_graph(int n_runs) const;
    void change_own_mask(std::vector<std::int64_t>& own_rows, std::vector<std::int64_t>& changed,
                         std::vector<float>& values);
    static void write_all_masks(const std::vector<DeviceAttention*>& sequences);
    void copy_mask(std::size_t layer, std::vector<ggml_fp16_t>& to) const;
    void change_masks(const std::vector<std::int64_t>& changed, const std::vector<float>& values,
                      StepInput& input);
    ggml_tensor* write_masks(ggml_context* context, std::size_t rows_at, std::size_t values_at,
                             std::size_t n) const;
    // Writes the positions that a layer's heads have, and kFreeRow between them, to `to`.
    static void copy_positions(const Served& served, float* to);
    void plan_look_up(const UnknownTokens& unknown, bool observed);
    void add_rows_near(StepInput& input);
    void tell_rows_looked_up();
    int tensors_of_look_up(const Served& served) const;
    std::size_t end_of_run(std::size_t first, std::size_t end) const;
    std::size_t add_look_up(std::size_t layer, std::size_t end, ggml_context* context,
                            ggml_cgraph* graph) const;
    void build_part();
    void launch_part();
    void add_moves(const RowMemory& memory, const std::vector<std::int32_t>& from,
                   const std::vector<std::int64_t>& to, StepInput& input, ggml_context* context,
                   ggml_cgraph* graph) const;
    bool needs_findings(const Served& served) const {
        return served.predictor || needs_value_squares(served);
    }
    bool needs_value_squares(const Served& served) const {
        return importance_.by_values || (served.predictor && served.predictor.shape.v_dim > 0);
    }
    // Returns the values of a KV head's tokens among the findings of the last step at an offset.
    const float* found(std::size_t offset, int head) const {
        return reinterpret_cast<const float*>(found_.data() + offset) + head * n_found_;
    }

    Device& device_;
    const ImportanceSettings& importance_;
    std::vector<Served> layers_;
    std::unique_ptr<DeviceMemory> input_;
    std::unique_ptr<DeviceMemory> positions_;
    std::unique_ptr<DeviceMemory> findings_;
    std::unique_ptr<DeviceMemory> predictors_;   // null: nothing is predicted
    std::unique_ptr<DeviceMemory> sinks_;        // null: no layer has sinks
    std::unique_ptr<DeviceMemory> row_numbers_;  // [row], f32
    std::unique_ptr<DeviceMemory> moves_;        // the rows that are moved, and where to
    std::unique_ptr<DeviceMemory> sums_;         // what single tokens gave; null: none is observed
    std::unique_ptr<DeviceMemory> ones_;     // in f32; null: the device sums up without products
    std::unique_ptr<DeviceMemory> outside_;  // in f32: see place_outside()
    // Holds masks of heads that are alike, [token][row], f16; null: heads never are.
    std::unique_ptr<DeviceMemory> masks_of_alike_;
    // Serve steps in llama.cpp's own graph, and are null if there are none: kept queries of several
    // tokens, and which rows findings are computed for.
    std::unique_ptr<DeviceMemory> queries_;
    std::unique_ptr<DeviceMemory> looked_up_;
    SingleSteps* singles_ = nullptr;
    std::vector<Alike> alike_;
    std::vector<std::uint8_t> node_memory_;
    // Holds the operations that replace nodes.
    std::unique_ptr<ggml_context, FreeContext> node_context_;
    // True if heads have as many positions as masks of single tokens have rows, and not one for
    // every row.
    bool packed_ = false;
    int layout_ = 0;            // the layout of masks that packed positions follow
    bool masks_known_ = false;  // whether the device has the masks of packed positions
    std::size_t position_bytes_ = 0;
    std::size_t token_positions_ = 0;  // offset in the input: [token], f32
    // Says where another input is: [KV head][token], i32, by how many positions keys are turned
    // back, for as many KV heads as any layer with a predictor has.
    std::size_t turns_ = 0;
    int most_predicted_heads_ = 0;
    int max_tokens_ = 0;  // most tokens of a micro-batch
    bool several_ = false;
    DeviceStep step_;
    int n_found_ = 0;
    bool has_observed_ = false;
    bool looks_at_queries_ = false;  // whether what queries gave is looked up
    UnknownTokens looked_for_;
    std::vector<std::size_t> rows_looked_up_;  // offset of each layer's rows in looked_up_
    // Offset of [KV head][kNeighbourhood], i64, of each layer in looked_up_: rows to which the
    // query of the single token gives nothing; and of as many zeros, f32, as all layers have of
    // them.
    std::vector<std::size_t> rows_near_;
    std::size_t zeros_ = 0;
    int n_summed_ = 0;  // how many queries the sums are of
    std::size_t layers_of_part_ = 0;
    // Holds the part that is built and not begun yet; it may have no layers.
    Part next_part_;
    LayerRange launched_{};              // the layers of the part that the device has begun last
    std::vector<std::uint8_t> written_;  // the input of a step
    HostMemory found_{device_};          // the findings of a step
    HostMemory read_sums_{device_};      // the sums that were read last
};

}  // namespace entropykv
