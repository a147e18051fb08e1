#include "llama/device_batch.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <stdexcept>

#include "llama/graph_nodes.hpp"

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

}  // namespace entropykv
