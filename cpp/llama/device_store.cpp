#include "llama/device_store.hpp"

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "decide/budget.hpp"
#include "decide/eviction.hpp"

namespace entropykv {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

// With more entries than this, decisions take longer than waking the threads that share them.
constexpr std::size_t kMuch = 1 << 15;
// If a prompt has many findings, they are looked up in this many parts: the host decides about one
// while the device computes the next.
constexpr int kParts = 4;

std::vector<LayerShape> ledger_shapes(const std::vector<DeviceLayerSource>& layers) {
    std::vector<LayerShape> shapes;
    for (const DeviceLayerSource& layer : layers) {
        LayerShape shape{layer.shape.n_head_kv, layer.shape.n_head_kv, 1, 1};
        shape.window = layer.shape.window;
        shape.chunked = layer.shape.chunked;
        shape.elsewhere = true;
        shapes.push_back(shape);
    }
    return shapes;
}

StoreSettings ledger_settings(StoreSettings settings) {
    const ImportanceSettings& importance = settings.importance;
    const bool of_shares = importance.measure().statistic == Statistic::probability ||
                           importance.measure().statistic == Statistic::squared_probability;
    if (!of_shares) throw std::invalid_argument("a measure that needs keys on the host");
    settings.stages_all_layers = true;  // threads commit heads of several layers at a time
    settings.ropes.clear();
    return settings;
}

// Returns what predicts scores of a layer, if the measure uses predictions. Throws
// std::invalid_argument for weights of other features.
DevicePredictor predictor_of(const DeviceLayerSource& source,
                             const ImportanceSettings& importance) {
    if (source.predictor.empty() || !importance.predicts()) return {};
    const LayerShape& shape = source.shape;
    const FeatureShape features =
        feature_shape(shape.k_dim, shape.v_dim, shape.latent, source.rope);
    if (source.predictor.size() != index(shape.n_head_kv * features.n))
        throw std::invalid_argument("a predictor's weights must be [n_head_kv][n_features]");
    return {source.rope, features, source.predictor};
}

}  // namespace

DeviceStore::DeviceStore(std::shared_ptr<Devices> devices,
                         const std::vector<DeviceLayerSource>& layers,
                         const StoreSettings& settings, const std::vector<int>& budgets, bool live)
    : shared_(std::move(devices)),
      sources_(layers),
      ledger_(ledger_shapes(layers), ledger_settings(settings)),
      type_(settings.type) {
    ledger_.set_workers(shared_->workers().n_threads(), *available_kernels().back());
    ledger_.set_budgets(budgets, pages_of(budgets), settings.protection);
    for (const auto& [layer, why] : shared_->on_host())
        sources_.at(index(layer)).memory = ggml_backend_cpu_buffer_type();
    if (live) place_layers();
}

// Takes the first place, with rows in main memory for layers whose device cannot compute their
// attention.
void DeviceStore::place_layers() {
    acquire(0);
    bool moved = false;
    for (int i = 0; i < n_layers(); ++i) {
        const Layer& layer = layers_[index(i)];
        const std::string op = unsupported_in(layer);
        if (op.empty()) continue;
        const std::string why = layer.device->device().name() + " cannot compute " + op;
        ggml_backend_buffer_type_t host = ggml_backend_cpu_buffer_type();
        if (sources_[index(i)].memory == host) throw std::runtime_error("its device " + why);
        sources_[index(i)].memory = host;
        shared_->serve_on_host(i, why);
        moved = true;
    }
    if (moved) place_layers();
}

// Allocates rows of all places for the budgets of this store.
std::shared_ptr<DevicePlaces> DeviceStore::make_places() const {
    const StoreSettings& settings = ledger_.settings();
    const std::vector<int> most = budgets();
    std::vector<LayerRows::Wanted> layers;
    const ggml_type type = ggml_type_of(type_);
    auto first = most.begin();
    for (const DeviceLayerSource& source : sources_) {
        const auto end = first + source.shape.n_head_kv;
        const std::size_t alignment =
            std::max(kRowAlignment, ggml_backend_buft_get_alignment(source.memory));
        layers.push_back(
            {source.shape, source.memory,
             rows_of_heads({first, end}, settings.max_tokens, settings.max_entries,
                           row_multiple(source.shape, type, alignment), shared_->n_places())});
        first = end;
    }
    return std::make_shared<DevicePlaces>(LayerRows::of(layers, type, shared_->n_places()), most);
}

void DeviceStore::acquire(int place) {
    release();
    next_ = -1;
    ledger_.truncate(0);
    try {
        take(place);
    } catch (...) {
        release();
        throw;
    }
}

void DeviceStore::take(int place) {
    std::shared_ptr<DevicePlaces> places = shared_->places();
    if (places == nullptr || !places->can_take(place, budgets())) {
        places = make_places();
        shared_->set_places(places);
    }
    places->take(place);
    places_ = std::move(places);
    place_ = place;
    taken_ = shared_->note_taken();
    most_ = places_->budgets();
    std::vector<LayerShape> shapes;
    for (const DeviceLayerSource& source : sources_) shapes.push_back(source.shape);
    const std::vector<PageLayout> layouts = page_layouts(shapes, type_);
    const StoreSettings& settings = ledger_.settings();
    layers_.reserve(sources_.size());
    for (const DeviceLayerSource& source : sources_) {
        add_layer(source);
        layers_.back().layout = layouts[layers_.size() - 1];
    }
    can_be_in_graph_ = true;
    n_readers_ = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        can_be_in_graph_ = can_be_in_graph_ && !sources_[i].is_apart &&
                           shared_->on_host().empty() &&
                           layers_[i].device->can_be_in_graph(layers_[i].number);
        n_readers_ += sources_[i].shape.readers;
    }
    most_runs_ = can_be_in_graph_ && shared_->n_places() > 1 ? shared_->n_places() : 0;
    for (std::size_t i = 0; i < layers_.size() && most_runs_ > 0; ++i)
        most_runs_ = sources_[i].dense_queries
                         ? std::min(most_runs_, layers_[i].device->most_runs(layers_[i].number))
                         : 0;
    const int most = settings.max_tokens;
    heads_can_be_alike_ = std::all_of(devices_.begin(), devices_.end(), [&](const auto& device) {
        return device->can_be_alike(most);
    });
    several_can_be_in_graph_ =
        can_be_in_graph_ && std::all_of(devices_.begin(), devices_.end(), [&](const auto& device) {
            return device->can_read_several_in_graph(most);
        });
    for (const auto& device : devices_)
        device->allocate(most, can_be_in_graph_, several_can_be_in_graph_, heads_can_be_alike_,
                         places_->singles(device->device()));
}

void DeviceStore::add_layer(const DeviceLayerSource& source) {
    const auto same = [&](const auto& device) {
        return device->device().memory() == source.memory;
    };
    auto found = std::find_if(devices_.begin(), devices_.end(), same);
    if (found == devices_.end())
        found = devices_.insert(devices_.end(),
                                std::make_unique<DeviceAttention>(shared_->of(source.memory),
                                                                  ledger_.settings().importance));
    // ggml takes one sink for every query head of a node, whatever the KV head.
    const LayerRows& rows = places_->rows(n_layers());
    layers_.push_back(
        {DeviceLayer(source.shape, rows, place_, source.has_sinks), found->get(), 0, {}});
    Layer& added = layers_.back();
    added.number =
        added.device->add(added.rows, source.params, source.has_sinks,
                          predictor_of(source, ledger_.settings().importance), source.slots);
}

// Returns the name of an operation that a layer needs and its device cannot compute, or an empty
// string.
std::string DeviceStore::unsupported_in(const Layer& layer) const {
    std::string op;
    for (const int n_tokens : {1, ledger_.settings().max_tokens})
        if (op.empty()) op = layer.device->unsupported(layer.number, n_tokens);
    return op;
}

Device& DeviceStore::device_of(int layer) const {
    return layers_.at(index(layer)).device->device();
}

template <typename IsMeant, typename Visit>
void DeviceStore::for_each_head_of(bool much, IsMeant is_meant, Visit visit) {
    std::vector<std::pair<int, int>> heads;
    for_each_head([&](int layer, int h) {
        if (is_meant(layer)) heads.emplace_back(layer, h);
    });
    if (!much || ledger_.entries() <= kMuch) {
        for (const auto& [layer, h] : heads) visit(layer, h, 0);
        return;
    }
    shared_->workers().run(static_cast<int>(heads.size()), [&](int i, int worker) {
        visit(heads[index(i)].first, heads[index(i)].second, worker);
    });
}

std::size_t DeviceStore::pages_of(const std::vector<int>& budgets) const {
    std::size_t next = 0;
    return ledger_.components().sum_over_heads([&](const Head& head) {
        return index(pages_for(budgets.at(next++), head.layout().entries));
    });
}

void DeviceStore::reserve(int n_tokens, std::int32_t position, std::int32_t rope_position,
                          int first, int n_drafts, bool see_all) {
    end_decisions();  // a step that failed may have left decisions
    if (n_tokens > 1) add_late_findings();
    const Measure& measure = ledger_.settings().importance.measure();
    const bool observing = measure.observes(n_tokens - n_drafts, position);
    step_ = {n_tokens, position, observing, first, n_drafts, rope_position, see_all};
    is_committed_ = false;
    for (Layer& layer : layers_) layer.read = 0;
    const bool has_room = std::exchange(next_, -1) == position && n_tokens == 1;
    if (!has_room) make_room(n_tokens, position);
}

// Makes room for tokens in the ledger, and chooses their rows.
void DeviceStore::make_room(int n_tokens, std::int32_t position) {
    next_ = -1;
    ledger_.reserve(n_tokens, position + n_tokens - 1, false);
    for_each_head_at_once(n_tokens > 1,
                          [&](int layer, int h, int) { head(layer, h).stage(n_tokens, position); });
}

void DeviceStore::begin_singles(const std::vector<DeviceStore*>& stores, int n_runs) {
    const std::size_t n_devices = stores.front()->devices_.size();
    std::vector<std::vector<DeviceAttention*>> sequences(n_devices);
    for (DeviceStore* store : stores) {
        store->step_.in_graph = true;
        store->step_.n_together = static_cast<int>(stores.size());
        for (std::size_t i = 0; i < n_devices; ++i) {
            store->devices_[i]->set_step(store->step_);
            sequences[i].push_back(store->devices_[i].get());
        }
    }
    for (const auto& of_device : sequences) {
        DeviceAttention::fit_masks(of_device);
        DeviceAttention::begin_singles(of_device, n_runs);
    }
    for (DeviceStore* store : stores) {
        store->n_changed_ = 0;
        store->plan_commit();
    }
}

bool DeviceStore::begin(bool alone) {
    step_.alike =
        heads_can_be_alike_ && std::all_of(devices_.begin(), devices_.end(),
                                           [](const auto& device) { return device->are_alike(); });
    step_.in_graph = step_.n_tokens > 1 && alone && several_can_be_in_graph_ && step_.alike;
    // Findings of this step overwrite those about unknown tokens, which must be read first.
    complete_ledger();
    for (const auto& device : devices_) device->begin_step(step_);
    n_changed_ = 0;
    plan_commit();
    return step_.in_graph;
}

void DeviceStore::begin_nodes() {
    for (const auto& device : devices_) device->begin_nodes();
}

std::size_t DeviceStore::layout() const {
    std::size_t layout = taken_ << 32U;  // there are fewer than 2^32 layouts of a place's masks
    for (const auto& device : devices_) layout += device->layout();
    return layout;
}

// Tells whether the ledger needs values or predictions of its entries.
bool DeviceStore::reads_values() const {
    const ImportanceSettings& importance = ledger_.settings().importance;
    return importance.predicts() || importance.by_values;
}

// Tells whether an eviction keeps the newest n tokens of every head, whatever their scores are:
// they are in its recent window, and in the window of its layer.
bool DeviceStore::protects_newest(int n) const {
    const Protection& protection = ledger_.settings().protection;
    if (ledger_.settings().own_windows || protection.recent_window < n) return false;
    bool all = true;
    for_each_head([&](int layer, int h) {
        all = all && protection.n_sinks + protection.recent_window <= budget(layer, h) &&
              ledger_.shape(layer).oldest_seen(step_.position + 1) <= step_.position + 1 - n;
    });
    return all;
}

// Decides what must be known before a step in llama.cpp's own graph is committed. Of single tokens,
// only an eviction must know what queries gave, and only of entries that it may drop, so findings
// are looked up for several tokens at once.
void DeviceStore::plan_commit() {
    plan_ = {};
    if (!step_.in_graph) return;
    const bool single = step_.n_tokens == 1;
    if (!late_.unknown) plan_.unknown = unknown_;
    if (reads_values()) {
        if (plan_.unknown.n == 0) plan_.unknown.rope_position = step_.rope_position;
        plan_.unknown.n += step_.n_tokens;
        plan_.unknown.n_staged = step_.n_tokens;
    }
    const bool any_unknown = plan_.unknown.n > 0;
    plan_.evicting = evicts();
    if (single) {
        const bool exposed = any_unknown && plan_.evicting && !protects_newest(plan_.unknown.n);
        const bool waits = plan_.evicting && (step_.observing || exposed);
        plan_.due = any_unknown && waits && (exposed || plan_.unknown.n == most_unknown());
        plan_.meanwhile = step_.n_drafts == 0 && !waits;
    } else {
        plan_.due = any_unknown;
        plan_.meanwhile = step_.n_drafts == 0 && !any_unknown && !step_.observing;
    }
}

// Returns of how many tokens the ledger may know nothing.
int DeviceStore::most_unknown() const {
    return std::min(kMostUnknown, ledger_.settings().max_tokens);
}

void DeviceStore::decide_meanwhile(const std::vector<DeviceStore*>& stores) {
    std::vector<DeviceStore*> deciding;
    for (DeviceStore* store : stores)
        if (store->plan_.meanwhile || store->prepares_look_up()) deciding.push_back(store);
    if (deciding.empty()) return;
    for (DeviceStore* store : deciding) store->deciding_ = true;
    stores.front()->shared_->background().start([deciding] {
        for (DeviceStore* store : deciding) store->decide();
    });
}

// Commits the step, or prepares what must be looked up first; what this throws is kept. After a
// single token, makes room for another one.
void DeviceStore::decide() noexcept {
    try {
        if (!plan_.meanwhile) return prepare_look_up();
        add_late_findings();
        for_each_head_at_once(
            plan_.evicting, [&](int layer, int h, int worker) { commit(layer, h, false, worker); });
        if (step_.n_tokens == 1 && step_.observing)
            for_each_head([&](int layer, int h) { head(layer, h).rows_near(step_.position); });
    } catch (...) {
        decision_error_ = std::current_exception();
        return;
    }
    if (step_.n_tokens > 1) return;
    try {
        make_room(1, step_.position + 1);
        next_ = step_.position + 1;
    } catch (...) {
        // The next step makes room itself, or fails.
    }
}

// Prepares to look up what a step has found out, and what else the ledger must know.
void DeviceStore::prepare_look_up() {
    const bool much = step_.n_tokens > 1 && ledger_.entries() > kMuch;
    for (const auto& device : devices_)
        device->prepare_look_up(plan_.due ? plan_.unknown : UnknownTokens{}, step_.observing,
                                much ? kParts : 1);
}

// Waits for decide(), and returns whether it was begun. Throws what that has thrown.
bool DeviceStore::end_background() {
    if (!std::exchange(deciding_, false)) return false;
    shared_->background().wait();
    if (decision_error_ != nullptr) std::rethrow_exception(std::exchange(decision_error_, nullptr));
    return true;
}

// Waits for the decisions about a step, and returns whether there were any. Throws what they have
// thrown.
bool DeviceStore::take_decisions() {
    if (!end_background() || !plan_.meanwhile) return false;
    unknown_ = plan_.unknown;
    unknown_.n_staged = 0;
    return true;
}

// Does what take_decisions() does, and begins to move rows if there were decisions. Throws as
// add_attention() does, too.
void DeviceStore::end_decisions() {
    if (take_decisions()) move_rows();
}

// Decides what the host reads after this single token, so that the ledger can be told while the
// next one is read: what tokens gave, if that one evicts, and what is unknown of the newest
// entries, before they are too many.
void DeviceStore::plan_late_look_up() {
    const int most = most_unknown();
    late_.unknown = unknown_.n >= most || (step_.observing && unknown_.n > most - kScoringInterval);
    late_.sums = evicts() && n_summed() + (step_.observing ? 1 : 0) > 0;
}

void DeviceStore::look_up_late(const std::vector<DeviceStore*>& stores) {
    std::vector<DeviceStore*> looking;
    for (DeviceStore* store : stores) {
        if (store->step_.n_tokens > 1) continue;
        store->plan_late_look_up();
        if (store->late_ || store->step_.observing) looking.push_back(store);
    }
    if (looking.empty()) return;
    for (std::size_t i = 0; i < looking.front()->devices_.size(); ++i) {
        std::vector<DeviceAttention::LookUp> all;
        for (const DeviceStore* store : looking)
            all.push_back({store->devices_[i].get(),
                           store->late_.unknown ? store->unknown_ : UnknownTokens{},
                           store->step_.observing, store->late_.sums});
        DeviceAttention::look_up_all(all);
    }
}

// Tells the ledger what was looked up late.
void DeviceStore::add_late_findings() {
    if (!late_) return;
    for (const auto& device : devices_) device->device().wait();
    for_each_head_at_once(true, [&](int layer, int h, int worker) {
        const Layer& of = layers_[index(layer)];
        if (late_.sums)
            ledger_.add_sum(layer, h, n_summed(), of.device->observed(of.number, h), worker);
        if (late_.unknown) complete_entries(layer, h, 0);
    });
    if (late_.sums) forget_sums();
    if (late_.unknown) unknown_ = {};
    late_ = {};
}

void DeviceStore::forget_sums() noexcept {
    for (const auto& device : devices_) device->forget_sums();
}

void DeviceStore::forget_unknown() noexcept {
    late_ = {};
    unknown_ = {};
    forget_sums();
    for (Layer& layer : layers_)
        for (DeviceHead& head : layer.rows.heads()) head.unknown.clear();
}

void DeviceStore::change_write(int layer, bool keys, ggml_tensor* node, NodeChanges& changes) {
    Layer& of = layers_.at(index(layer));
    of.device->change_write(of.number, keys, node, changes);
}

std::vector<ggml_tensor*> DeviceStore::attention_of(int layer, const DeviceNode& node,
                                                    int n_sequences) {
    const Layer& of = layers_.at(index(layer));
    return of.device->attention_of(of.number, of.read, node, n_sequences);
}

std::vector<ggml_tensor*> DeviceStore::upkeep_of(int layer, const DeviceNode& node,
                                                 bool& writes_masks) {
    const Layer& of = layers_.at(index(layer));
    return of.device->upkeep_of(of.number, of.read, node, writes_masks);
}

bool DeviceStore::note_changed(int layer) {
    ++layers_.at(index(layer)).read;
    return ++n_changed_ == n_readers_;
}

int DeviceStore::most_drafts(std::int32_t position, int wanted) const {
    int most = wanted;
    if (ledger_.settings().importance.measure().observes()) {
        const int since = position % kScoringInterval;
        most = std::min(most, since == 0 ? 0 : kScoringInterval - since - 1);
    }
    for_each_head(
        [&](int layer, int h) { most = std::min(most, budget(layer, h) - count(layer, h)); });
    return most <= 0 ? 0 : ledger_.most_drafts(most);
}

void DeviceStore::add_attention(int layer, const DeviceNode& node, ggml_context* context,
                                ggml_cgraph* graph) {
    Layer& of = layers_.at(index(layer));
    of.device->add_attention(of.number, of.read++, node, context, graph);
}

bool DeviceStore::evicts() const {
    bool any = false;
    for_each_head([&](int layer, int h) {
        any = any || count(layer, h) + step_.n_tokens > budget(layer, h);
    });
    return any;
}

void DeviceStore::complete_ledger() {
    end_decisions();
    add_late_findings();
    for (const auto& device : devices_) device->device().wait();  // for rows that are moved
    late_ = {n_summed() > 0, unknown_.n > 0};
    if (!late_) return;
    for (const auto& device : devices_)
        DeviceAttention::look_up_all({{device.get(), unknown_, false, late_.sums}});
    add_late_findings();
}

// Tells the ledger what was looked up for the unknown entries of a head, which are followed by
// n_later tokens that are not entries yet.
void DeviceStore::complete_entries(int layer, int h, int n_later) {
    const Layer& of = layers_[index(layer)];
    const float* value_squares = of.device->value_squares(of.number, h);
    const bool predicts = ledger_.settings().importance.predicts();
    Head& entries = ledger_.components().head(layer, h);
    const PageLayout& layout = entries.layout();
    std::vector<int>& unknown = head(layer, h).unknown;
    int number = of.device->n_found() - n_later - static_cast<int>(unknown.size());
    for (const int entry : unknown) {
        const Slot slot = entries.place(entry);
        if (value_squares != nullptr)
            layout.value_square(slot.page, slot.index) = value_squares[number];
        if (predicts) {
            const float given = PackedImportance(entries.importance(entry)).given();
            entries.pages.importance(layout.page_of(entry))[slot.index] =
                PackedImportance(given, of.device->predicted(of.number, h, number)).packed();
        }
        ++number;
    }
    unknown.clear();
}

void DeviceStore::commit_steps(const std::vector<DeviceStore*>& stores) {
    std::vector<DeviceStore*> decided;
    for (DeviceStore* store : stores) {
        if (std::exchange(store->is_committed_, true)) continue;
        if (store->step_.in_graph && store->plan_.meanwhile) {
            store->take_decisions();
            decided.push_back(store);
        } else {
            store->commit_alone();
        }
        store->peak_ = std::max(store->peak_, store->used_bytes());
    }
    if (decided.empty()) return;
    move_rows(decided);
    look_up_late(decided);
}

void DeviceStore::commit_alone() {
    if (step_.in_graph) {
        const bool prepared = end_background();
        add_late_findings();
        commit_by_parts(prepared);
        forget_sums();
        unknown_ = plan_.due ? UnknownTokens{} : plan_.unknown;
        unknown_.n_staged = 0;
    } else {
        for (const auto& device : devices_) device->end_step();
        for_each_head_at_once(
            true, [&](int layer, int h, int worker) { commit(layer, h, true, worker); });
    }
    move_rows();
}

// Commits a step with what the devices have found out, part by part of the layers. prepared:
// whether prepare_look_up() was called.
void DeviceStore::commit_by_parts(bool prepared) {
    const bool found = looks_up();
    const auto decide = [&](auto is_meant) {
        for_each_head_of(found || plan_.evicting, is_meant, [&](int layer, int h, int worker) {
            if (plan_.due) complete_entries(layer, h, step_.n_tokens);
            commit(layer, h, found, worker);
        });
    };
    if (!found) return decide([](int) { return true; });
    if (!prepared) prepare_look_up();
    for (const auto& device : devices_) device->look_up();
    for (std::size_t n_decided = 0; n_decided < layers_.size();) {
        std::vector<LayerRange> parts;
        for (const auto& device : devices_) {
            parts.push_back(device->next_part());
            n_decided += parts.back().end - parts.back().first;
        }
        const auto is_in_parts = [&](const Layer& of) {
            const auto device =
                std::find_if(devices_.begin(), devices_.end(),
                             [&](const auto& candidate) { return candidate.get() == of.device; });
            return parts[static_cast<std::size_t>(device - devices_.begin())].has(of.number);
        };
        decide([&](int layer) { return is_in_parts(layers_[index(layer)]); });
    }
}

// Turns the tokens of the micro-batch into entries of a head. found: whether the device has looked
// up what the host must know about them.
void DeviceStore::commit(int layer, int h, bool found, int worker) {
    if (step_.n_drafts > 0) return;  // see settle_drafts()
    const Layer& of = layers_[index(layer)];
    stage(layer, h, 0, step_.n_tokens, found);
    const float* observed = found ? of.device->observed(of.number, h) : nullptr;
    if (observed != nullptr && n_summed() > 0)
        ledger_.add_sum(layer, h, n_summed(), std::exchange(observed, nullptr), worker);
    ledger_.commit(layer, h, step_.n_tokens, observed, nullptr, 0.0f, worker);
    DeviceHead& rows_of_head = head(layer, h);
    if (step_.in_graph && !plan_.due && plan_.unknown.n > 0)
        rows_of_head.unknown.push_back(rows_of_head.count);  // the row of the single token
    follow_ledger(layer, h);
}

// Puts n tokens of a head, from `begin` on in the micro-batch, into the ledger's staging area.
void DeviceStore::stage(int layer, int h, int begin, int n_staged, bool found) {
    const Layer& of = layers_[index(layer)];
    const float* value_squares = found ? of.device->value_squares(of.number, h) : nullptr;
    const bool predicts = ledger_.settings().importance.predicts();
    // Findings about earlier tokens come first.
    const int first = std::max(0, of.device->n_found() - step_.n_tokens);
    const PageLayout& layout = ledger_.layout(layer);
    std::byte* const* page = ledger_.staging(layer, h);
    const int count = head(layer, h).count;
    const int end = begin + n_staged;
    for (int token = begin; token < end; token += layout.entries, ++page) {
        const int n = std::min(layout.entries, end - token);
        std::iota(layout.rows(*page), layout.rows(*page) + n, count + token);
        std::iota(layout.positions(*page), layout.positions(*page) + n, step_.position + token);
        if (value_squares != nullptr)
            std::copy_n(value_squares + first + token, n, layout.value_squares(*page));
        else
            std::fill_n(layout.value_squares(*page), n, 0.0f);
        float* importance = layout.importance(*page);
        std::fill_n(importance, n, 0.0f);
        for (int i = 0; i < n && predicts; ++i)
            importance[i] =
                PackedImportance(0.0f, found ? of.device->predicted(of.number, h, first + token + i)
                                             : kLeastPrediction)
                    .packed();
    }
}

void DeviceStore::follow_ledger(int layer, int h) {
    DeviceHead& of = head(layer, h);
    // If nothing was evicted, entries were added at the end.
    if (count(layer, h) == of.used()) return of.keep_staged();
    take_order_of_ledger(layer, h);
}

void DeviceStore::take_order_of_ledger(int layer, int h) {
    DeviceHead& of = head(layer, h);
    Head& entries = ledger_.components().head(layer, h);
    const PageLayout& layout = entries.layout();
    entries.for_each_page({}, [&](std::byte* page, int n, int first) {
        const std::int32_t* rows = layout.rows(page);
        int n_there = 0;  // entries that are in their rows
        for (int i = 0; i < n; ++i) n_there += rows[i] == first + i ? 1 : 0;
        for (int i = 0; i < n && n_there < n; ++i) {
            if (rows[i] == first + i) continue;
            of.move(std::exchange(layout.row(page, i), first + i), first + i);
            of.set_position(first + i, static_cast<float>(layout.positions(page)[i]));
        }
    });
    of.hold_first(entries.count());
}

// The stores must share places.
void DeviceStore::move_rows(const std::vector<DeviceStore*>& stores) {
    for (std::size_t i = 0; i < stores.front()->devices_.size(); ++i) {
        std::vector<DeviceAttention*> sequences;
        for (const DeviceStore* store : stores) sequences.push_back(store->devices_[i].get());
        DeviceAttention::move_rows(sequences);
    }
}

void DeviceStore::settle_drafts(int n_accepted) {
    if (n_accepted < 0 || n_accepted > step_.n_drafts)
        throw std::invalid_argument("fewer drafts than none, or more than were read");
    const bool found = !step_.in_graph || looks_up();
    for_each_head([&](int layer, int h) {
        for (int token = 0; token <= n_accepted; ++token) {
            stage(layer, h, token, 1, found);
            ledger_.commit_token(layer, h, 0, step_.position + token, nullptr, 0);
        }
        follow_ledger(layer, h);
    });
    move_rows();
    peak_ = std::max(peak_, used_bytes());
}

std::vector<int> DeviceStore::budgets() const {
    std::vector<int> all;
    for (int layer = 0; layer < ledger_.n_layers(); ++layer)
        for (int h = 0; h < ledger_.shape(layer).n_head_kv; ++h) all.push_back(budget(layer, h));
    return all;
}

void DeviceStore::resize(const std::vector<DeviceStore*>& stores, const std::vector<int>& budgets,
                         const Protection& protection) {
    const bool fits = std::all_of(stores.begin(), stores.end(), [&](const DeviceStore* store) {
        return store->has_rows_for(budgets);
    });
    if (!fits) return grow(stores, budgets, protection);
    for (DeviceStore* store : stores) store->set_budgets(budgets, protection);
}

// Tells whether budgets can be set without other rows.
bool DeviceStore::has_rows_for(const std::vector<int>& budgets) const {
    if (budgets.size() != ledger_.components().n_heads())
        throw std::invalid_argument("there must be a budget for every KV head");
    return n_layers() == 0 ||
           std::equal(budgets.begin(), budgets.end(), most_.begin(), std::less_equal<>());
}

// Sets budgets that there are rows for.
void DeviceStore::set_budgets(const std::vector<int>& budgets, const Protection& protection) {
    complete_ledger();
    next_ = -1;
    ledger_.set_budgets(budgets, pages_of(budgets), protection);
    for_each_head([&](int layer, int h) { follow_ledger(layer, h); });
    move_rows();
}

// Sets budgets for which the rows of all places are allocated anew. The entries are kept on the
// host meanwhile.
void DeviceStore::grow(const std::vector<DeviceStore*>& stores, const std::vector<int>& budgets,
                       const Protection& protection) {
    // Says what a store holds and may hold.
    struct Held {
        DeviceStore* store;
        bool live;
        std::vector<int> counts;
        std::vector<std::vector<std::byte>> states;
        std::vector<int> most;
        std::vector<int> budgets;
        Protection protection;
    };
    std::vector<Held> all;
    for (DeviceStore* store : stores) {
        Held& held = all.emplace_back(Held{store,
                                           store->n_layers() > 0,
                                           {},
                                           {},
                                           store->most_,
                                           store->budgets(),
                                           store->ledger_.settings().protection});
        if (!held.live) continue;
        std::vector<std::vector<std::byte*>> addresses(index(store->n_layers()));
        store->for_each_head([&](int layer, int h) {
            held.counts.push_back(store->count(layer, h));
            held.states.emplace_back(store->state_bytes(layer, h));
            addresses[index(layer)].push_back(held.states.back().data());
        });
        for (int layer = 0; layer < store->n_layers(); ++layer)
            store->save_layer(layer, addresses[index(layer)]);
    }
    const auto take = [&](auto budgets_of, auto protection_of) {
        for (const Held& held : all) held.store->release();
        for (Held& held : all) {
            DeviceStore& store = *held.store;
            if (held.live) store.ledger_.truncate(0);
            store.ledger_.set_budgets(budgets_of(held), store.pages_of(budgets_of(held)),
                                      protection_of(held));
            if (!held.live) continue;
            store.acquire(store.place_);
            std::vector<std::byte*> addresses;
            for (std::vector<std::byte>& state : held.states) addresses.push_back(state.data());
            store.load(held.counts, addresses);
        }
    };
    try {
        take([&](const Held&) -> const std::vector<int>& { return budgets; },
             [&](const Held&) { return protection; });
    } catch (const std::bad_alloc&) {
        const auto protection_before = [](const Held& held) { return held.protection; };
        take(
            [](const Held& held) -> const std::vector<int>& {
                return held.live ? held.most : held.budgets;
            },
            protection_before);
        for (const Held& held : all)
            if (held.live) held.store->set_budgets(held.budgets, held.protection);
        throw;
    }
}

void DeviceStore::truncate(std::int32_t position) {
    if (position == 0) {
        end_decisions();
        forget_unknown();
    }
    complete_ledger();
    next_ = -1;
    ledger_.truncate(position);
    for_each_head([&](int layer, int h) {
        head(layer, h).unstage();
        follow_ledger(layer, h);
    });
    move_rows();
}

void DeviceStore::check_ropes(const std::vector<RopeParams>& ropes) const {
    if (ropes.size() != layers_.size())
        throw std::invalid_argument("there must be RoPE parameters for every layer");
    for (std::size_t layer = 0; layer < layers_.size(); ++layer)
        if (!fits(ropes[layer], layers_[layer].rows.shape().k_dim))
            throw std::invalid_argument("RoPE parameters that do not fit the keys of a layer");
}

std::string DeviceStore::rotation_problem(const std::vector<RopeParams>& ropes) {
    check_ropes(ropes);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        const Layer& of = layers_[layer];
        const std::string op = of.device->unsupported_rotation(of.number, ropes[layer]);
        if (!op.empty())
            return "its device " + of.device->device().name() + " cannot compute " + op;
    }
    return {};
}

void DeviceStore::rebase(const std::vector<RopeParams>& ropes, int n_sinks, int old_shift,
                         int new_shift) {
    check_ropes(ropes);
    complete_ledger();
    for (int layer = 0; layer < n_layers(); ++layer) {
        const RopeParams& rope = ropes[index(layer)];
        if (rope.n_dims == 0) continue;
        std::vector<std::vector<std::int32_t>> by_row;
        for (int h = 0; h < rows(layer).shape().n_head_kv; ++h) {
            const DeviceHead& of = head(layer, h);
            const Head& entries = ledger_.head(layer, h);
            std::vector<std::int32_t>& turns = by_row.emplace_back(index(of.rows()), 0);
            for (int i = 0; i < entries.count(); ++i)
                turns[index(i)] = rope_position(entries.position(i), n_sinks, new_shift) -
                                  rope_position(entries.position(i), n_sinks, old_shift);
        }
        const Layer& of = layers_[index(layer)];
        of.device->rotate(of.number, rope, by_row);
    }
}

void DeviceStore::release() noexcept {
    try {
        end_decisions();
    } catch (const std::exception&) {
        // The step has failed, and nothing of it stays.
    }
    for (const auto& device : devices_) device->device().wait();
    forget_unknown();
    layers_.clear();
    devices_.clear();
    if (places_ != nullptr) places_->leave(place_);
    places_.reset();
}

std::size_t DeviceStore::budget_bytes() const {
    std::size_t bytes = 0;
    for (int layer = 0; layer < ledger_.n_layers(); ++layer) {
        const std::size_t of_entry =
            entry_bytes_of(sources_[index(layer)].shape, ggml_type_of(type_));
        for (int h = 0; h < ledger_.shape(layer).n_head_kv; ++h)
            bytes += index(budget(layer, h)) * of_entry;
    }
    return bytes;
}

std::size_t DeviceStore::used_bytes() const {
    std::size_t bytes = 0;
    for (int layer = 0; layer < n_layers(); ++layer) {
        std::size_t n = 0;
        for (int h = 0; h < ledger_.shape(layer).n_head_kv; ++h) n += index(count(layer, h));
        bytes += n * rows(layer).entry_bytes();
    }
    return bytes;
}

std::size_t DeviceStore::staging_bytes() const {
    std::size_t bytes = 0;
    for (const Layer& layer : layers_) bytes += layer.rows.bytes();
    return bytes - std::min(bytes, budget_bytes());
}

std::size_t DeviceStore::scratch_bytes() const {
    std::size_t bytes = ledger_.components().scratch_bytes() + ledger_.share().budget_bytes() +
                        ledger_.share().pool().staging().bytes();
    for (const auto& device : devices_) bytes += device->scratch_bytes();
    for (const DeviceLayerSource& source : sources_)
        bytes += source.predictor.size() * sizeof(float);
    for (const Layer& layer : layers_)
        for (const DeviceHead& head : layer.rows.heads())
            bytes += index(head.rows()) * sizeof(float);
    return bytes;
}

std::vector<std::pair<std::string, std::size_t>> DeviceStore::device_bytes() const {
    std::vector<std::pair<std::string, std::size_t>> of_devices;
    for (const auto& device : devices_) {
        std::size_t bytes = device->scratch_bytes() + device->device().scratch_bytes();
        for (const Layer& layer : layers_)
            if (layer.device == device.get()) bytes += layer.rows.bytes();
        of_devices.emplace_back(device->device().name(), bytes);
    }
    return of_devices;
}

}  // namespace entropykv
