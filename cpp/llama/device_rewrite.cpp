#include "llama/device_rewrite.hpp"

#include <algorithm>
#include <iterator>
#include <new>
#include <stdexcept>

namespace entropykv {
namespace {

// The most tensors that one sequence needs for the attention of a layer.
constexpr int kTensorsOfStore = 4096;

}  // namespace

void DeviceBatch::clear() {
    parts_.clear();
    n_tokens_ = 0;
    in_graph_ = false;
    fault_ = nullptr;
}

void DeviceBatch::add(DeviceStore& store, int n_tokens, std::int32_t position,
                      std::int32_t rope_position, int n_drafts, bool see_all) {
    if (std::find(parts_.begin(), parts_.end(), &store) != parts_.end())
        throw std::invalid_argument("a sequence has one part of a micro-batch");
    parts_.reserve(parts_.size() + 1);
    store.reserve(n_tokens, position, rope_position, n_tokens_, n_drafts, see_all);
    parts_.push_back(&store);
    n_tokens_ += n_tokens;
}

// llama.cpp calls what calls these functions, so no exception may leave them.
template <typename Function>
void DeviceBatch::guarded(Function function) noexcept {
    if (fault_ != nullptr) return;
    try {
        function();
    } catch (const std::bad_alloc&) {
        fault_ = std::make_exception_ptr(
            std::runtime_error("a device has no memory left to compute attention"));
    } catch (...) {
        fault_ = std::current_exception();
    }
}

bool DeviceBatch::begin(bool in_graph) noexcept {
    const auto before = std::move(layout_);
    layout_.clear();
    guarded([&] {
        runs_.clear();
        for (std::size_t i = 0; i < parts_.size(); ++i)
            if (i == 0 || !parts_[i]->is_beside(*parts_[i - 1])) runs_.push_back(i);
        runs_.push_back(parts_.size());
        if (in_graph && can_read_singles()) {
            DeviceStore::begin_singles(parts_, static_cast<int>(runs_.size()) - 1);
            in_graph_ = true;
            for (const DeviceStore* store : parts_) layout_.emplace_back(store, store->layout());
            return;
        }
        for (DeviceStore* store : parts_) in_graph_ = store->begin(in_graph && parts_.size() == 1);
    });
    return fault_ == nullptr && !layout_.empty() && layout_ == before;
}

void DeviceBatch::begin_nodes() noexcept {
    guarded([&] {
        for (DeviceStore* store : parts_) store->begin_nodes();
    });
}

// Tells whether all sequences read a single token that llama.cpp's own graph can read.
bool DeviceBatch::can_read_singles() const {
    const auto n_runs = static_cast<int>(runs_.size()) - 1;
    return std::all_of(parts_.begin(), parts_.end(), [&](const DeviceStore* store) {
        return store->can_read_single() &&
               (parts_.size() == 1 ||
                (store->shares_places(*parts_.front()) && n_runs <= store->most_runs()));
    });
}

void DeviceBatch::change_write(int layer, bool keys, ggml_tensor* node,
                               NodeChanges& changes) noexcept {
    guarded([&] { parts_.front()->change_write(layer, keys, node, changes); });
}

void DeviceBatch::change_attention(int layer, const DeviceNode& node, ggml_tensor* target,
                                   const std::vector<ggml_tensor*>& slots,
                                   NodeChanges& changes) noexcept {
    guarded([&] {
        check_tokens(node);
        std::vector<ggml_tensor*> attention;
        for (std::size_t i = 0; i + 1 < runs_.size(); ++i) {
            const auto of_run = parts_[runs_[i]]->attention_of(
                layer, node, static_cast<int>(runs_[i + 1] - runs_[i]));
            attention.insert(attention.end(), of_run.begin(), of_run.end());
        }
        bool writes_masks = false;
        std::vector<ggml_tensor*> others = parts_.front()->upkeep_of(layer, node, writes_masks);
        others.insert(others.begin() + (writes_masks ? 1 : 0), attention.begin() + 1,
                      attention.end());
        if (others.size() > slots.size())
            throw GraphError("a graph has fewer nodes that compute nothing than the first one");
        for (std::size_t i = 0; i < others.size(); ++i) changes.become(slots[i], others[i]);
        changes.become(target, attention.front());
    });
    note_changed(layer);
}

void DeviceBatch::note_changed(int layer) noexcept {
    guarded([&] {
        bool is_last = false;
        for (DeviceStore* store : parts_) is_last = store->note_changed(layer);
        if (is_last) DeviceStore::decide_meanwhile(parts_);
    });
}

void DeviceBatch::attend(int layer, const DeviceNode& node) noexcept {
    guarded([&] {
        check_tokens(node);
        Device& device = parts_.front()->device_of(layer);
        const DeviceNode there = device.relay().bring(node);
        // One graph serves as many sequences as it has room for.
        for (auto store = parts_.begin(); store != parts_.end();) {
            const auto context = device.graph_context();
            ggml_cgraph* graph = Device::new_graph(context.get());
            do {
                (*store++)->add_attention(layer, there, context.get(), graph);
            } while (store != parts_.end() && Device::has_room_for(context.get(), kTensorsOfStore));
            device.place(graph);
            device.compute(graph);
        }
        device.relay().give_back();
    });
}

void DeviceBatch::check_tokens(const DeviceNode& node) const {
    if (node.q->ne[1] != n_tokens_)
        throw GraphError("a graph reads another number of tokens than the session");
}

void DeviceBatch::commit() {
    std::vector<DeviceStore*> stores;
    std::copy_if(parts_.begin(), parts_.end(), std::back_inserter(stores),
                 [](const DeviceStore* store) { return !store->has_drafts(); });
    DeviceStore::commit_steps(stores);
}

void DeviceBatch::check_step() const {
    if (fault_ != nullptr) std::rethrow_exception(fault_);
}

void DeviceRewrite::begin_step() {
    GraphRewrite::begin_step();
    changes_.undo();
    order_.clear();
    begun_ = false;
}

void DeviceRewrite::begin() {
    begun_ = true;
    n_repeated_ = 0;
    const bool same = batch_.begin(!times_.measures());
    repeats_ = same && is_whole_;
    if (!repeats_) make_anew();
}

void DeviceRewrite::make_anew() {
    repeats_ = is_whole_ = false;
    seen_.clear();
    changes_.forget();
    batch_.begin_nodes();
}

// Tells llama.cpp to stop at attention that is computed between two nodes.
bool DeviceRewrite::change(ggml_tensor* node) {
    if (!begun_) begin();
    if (!batch_.in_graph()) return leave_out(node);
    const bool is_other = node->op != GGML_OP_SET_ROWS && node->op != GGML_OP_FLASH_ATTN_EXT;
    if (repeats_ && (is_other || repeat(node))) return false;
    order_.note(node);
    if (is_other) return false;
    const void* source = node->src[0]->data;
    const int attends = change_anew(node);
    seen_.push_back({node, source, attends, changes_.size()});
    return false;
}

// Changes a node as in the last step. Returns false if this is another graph than then.
bool DeviceRewrite::repeat(const ggml_tensor* node) {
    const bool is_next = n_repeated_ < seen_.size() && seen_[n_repeated_].node == node &&
                         seen_[n_repeated_].source == node->src[0]->data;
    if (is_next && changes_.repeat(seen_[n_repeated_].n_changes)) {
        const Seen& seen = seen_[n_repeated_++];
        if (seen.attends >= 0) {
            ++served_;
            batch_.note_changed(seen.attends);
        }
        return true;
    }
    if (n_repeated_ == 0) {
        make_anew();
        return false;
    }
    fault_ = "a graph is another one than in the last step, from one of its layers on";
    return true;
}

// Changes a node if it writes or reads the cache. Returns the number of the layer whose attention
// it computes; -1: none.
int DeviceRewrite::change_anew(ggml_tensor* node) {
    if (node->op == GGML_OP_SET_ROWS) {
        for (const bool keys : {true, false}) {
            const int layer = layer_of(cache_layer_of(node, keys ? kCacheK : kCacheV));
            if (layer >= 0) {
                batch_.change_write(layer, keys, node, changes_);
                break;
            }
        }
        return -1;
    }
    const int layer = layer_of(cache_layer_of(node->src[1], kCacheK));
    if (!is_served(layer)) return -1;
    if (is_usable_in(nodes_[static_cast<std::size_t>(layer)].memory, node))
        batch_.change_attention(layer, {node->src[0], nullptr, nullptr, node, node->src[4]}, node,
                                order_.slots_of(node), changes_);
    else
        fault_ = "a layer's attention is on another device than its K and V";
    return layer;
}

void DeviceRewrite::end_step() {
    changes_.undo();
    is_whole_ = batch_.in_graph() && served_ == n_expected() && fault_ == nullptr;
}

// Returns the number of a layer in the store; -1: it has none.
int DeviceRewrite::layer_of(int cache_layer) const {
    for (std::size_t i = 0; i < nodes_.size(); ++i)
        if (nodes_[i].cache_layer == cache_layer) return static_cast<int>(i);
    return -1;
}

// Counts an attention node, and tells whether its layer is known.
bool DeviceRewrite::is_served(int layer) {
    ++served_;
    if (layer < 0) fault_ = kUnknownNode;
    return layer >= 0;
}

// Makes llama.cpp compute everything up to an attention node, and nothing for the node itself.
bool DeviceRewrite::leave_out(ggml_tensor* node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
    node->op = GGML_OP_NONE;
    left_out_ = node;
    return true;
}

// Computes the attention of a node that was left out; returns false for any other node. Afterwards
// the node is unchanged, because llama.cpp may use its graph again.
bool DeviceRewrite::attend_instead(ggml_tensor* node) {
    if (left_out_ != node) return false;
    left_out_ = nullptr;
    node->op = GGML_OP_FLASH_ATTN_EXT;
    const int layer = layer_of(cache_layer_of(node->src[1], kCacheK));
    if (is_served(layer))
        batch_.attend(layer, {node->src[0], node->src[1], node->src[2], node, node->src[4]});
    return true;
}

void DeviceRewrite::check_step() { batch_.check_step(); }

int DeviceRewrite::n_expected() const {
    int n = 0;
    for (const AttentionNode& node : nodes_) n += node.shape.readers;
    return n;
}

}  // namespace entropykv
