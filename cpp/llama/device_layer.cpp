#include "llama/device_layer.hpp"

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "decide/importance.hpp"

namespace entropykv {

namespace {

// KV heads are put into the fewest groups with equally many rows that add at most this many
// thousandths.
constexpr int kPaddingPerMille = 50;
// Several sequences share an attention node if equal rows for all heads add at most this many
// thousandths.
constexpr int kSharedPaddingPerMille = 500;
constexpr std::int64_t kTooMany = std::int64_t{1} << 60;
// K or V of several layers lie in one tensor only up to this many bytes: some kernels count in 32
// bits.
constexpr std::size_t kMostTensorBytes = (std::size_t{1} << 31) - 1;

int whole_steps(int rows, int step = kDeviceRowStep) { return (rows + step - 1) / step * step; }

}  // namespace

int needed_rows(int budget, int max_tokens, int max_entries) {
    return std::min(budget + max_tokens, max_entries);
}

int row_multiple(const LayerShape& shape, ggml_type type, std::size_t alignment) {
    std::size_t multiple = 1;
    for (const int dim : {shape.k_dim, shape.latent ? shape.k_dim : shape.v_dim})
        multiple = std::lcm(multiple, alignment / std::gcd(alignment, ggml_row_size(type, dim)));
    return static_cast<int>(multiple);
}

std::vector<int> rows_of_heads(const std::vector<int>& budgets, int max_tokens, int max_entries,
                               int multiple, int n_places) {
    std::vector<int> needed;
    for (const int budget : budgets)
        needed.push_back(whole_steps(needed_rows(budget, max_tokens, max_entries), multiple));
    const std::size_t n = needed.size();
    const std::int64_t sum = std::accumulate(needed.begin(), needed.end(), std::int64_t{0});
    const int most = *std::max_element(needed.begin(), needed.end());
    const std::int64_t added = static_cast<std::int64_t>(n) * most - sum;
    if (n_places > 1 && 1000 * added <= kSharedPaddingPerMille * sum)
        return std::vector<int>(n, most);
    // Describes the best way to put the first heads into some number of groups: how many rows they
    // get then, and where the last group begins.
    struct Grouped {
        std::int64_t rows;
        std::size_t last;
    };
    std::vector<std::vector<Grouped>> best(1, std::vector<Grouped>(n + 1, {kTooMany, 0}));
    best[0][0].rows = 0;
    while (best.back()[n].rows == kTooMany ||
           1000 * (best.back()[n].rows - sum) > kPaddingPerMille * sum) {
        const std::vector<Grouped>& before = best.back();
        std::vector<Grouped> with(n + 1, {kTooMany, 0});
        for (std::size_t end = 1; end <= n; ++end) {
            std::int64_t largest = 0;
            for (std::size_t first = end; first-- > 0;) {
                largest = std::max<std::int64_t>(largest, needed[first]);
                const std::int64_t rows =
                    before[first].rows + largest * static_cast<std::int64_t>(end - first);
                if (rows < with[end].rows) with[end] = {rows, first};
            }
        }
        best.push_back(std::move(with));
    }
    for (std::size_t groups = best.size() - 1, end = n; groups > 0; --groups) {
        const std::size_t first = best[groups][end].last;
        const auto begin = needed.begin();
        const auto of_group = begin + static_cast<std::ptrdiff_t>(first);
        const auto behind = begin + static_cast<std::ptrdiff_t>(end);
        std::fill(of_group, behind, *std::max_element(of_group, behind));
        end = first;
    }
    return needed;
}

std::int64_t rows_of_layer(const std::vector<int>& head_rows, int n_places) {
    return n_places * std::accumulate(head_rows.begin(), head_rows.end(), std::int64_t{0});
}

std::int64_t rows_of_layers(const std::vector<std::vector<int>>& head_rows, int n_places) {
    std::int64_t first = 0;
    std::int64_t end = 0;
    for (const std::vector<int>& of_layer : head_rows) {
        first += rows_of_layer(of_layer, n_places - 1);
        for (const int rows : of_layer) {
            end = std::max(end, first + whole_steps(rows));
            first += rows;
        }
    }
    return end;
}

std::size_t entry_bytes_of(const LayerShape& shape, ggml_type type) {
    return ggml_row_size(type, shape.k_dim) + (shape.latent ? 0 : ggml_row_size(type, shape.v_dim));
}

void DeviceHead::set_position(int row, float position) {
    float& known = positions.at(static_cast<std::size_t>(row));
    if (known == position) return;
    known = position;
    changed.push_back(row);
}

void DeviceHead::stage(int n_tokens, std::int32_t position) {
    unstage();
    if (count + n_tokens > rows())
        throw std::logic_error("a KV head has no free rows on the device");
    // The rows behind the entries are free, so the positions of all rows of the tokens change.
    const auto n_changed = static_cast<std::ptrdiff_t>(changed.size());
    changed.resize(changed.size() + static_cast<std::size_t>(n_tokens));
    std::iota(changed.begin() + n_changed, changed.end(), count);
    float* of_tokens = positions.data() + count;
    for (int token = 0; token < n_tokens; ++token)
        of_tokens[token] = static_cast<float>(position + token);
    staged = n_tokens;
}

void DeviceHead::unstage() {
    for (; staged > 0; --staged) set_position(count + staged - 1, kFreeRow);
}

void DeviceHead::keep_staged() {
    count += staged;
    staged = 0;
}

void DeviceHead::hold(const std::vector<std::int32_t>& of_entries) {
    const auto n = static_cast<int>(of_entries.size());
    for (int row = 0; row < n; ++row)
        set_position(row, static_cast<float>(of_entries[static_cast<std::size_t>(row)]));
    hold_first(n);
}

void DeviceHead::hold_first(int n) {
    n_searched = 0;
    near.clear();
    for (int row = n; row < used(); ++row) set_position(row, kFreeRow);
    count = n;
    staged = 0;
}

void DeviceHead::move(int from, int to) {
    moves.push_back({from, to});
    std::replace(unknown.begin(), unknown.end(), from, to);
}

const std::vector<int>& DeviceHead::rows_near(std::int32_t position) {
    const auto is_near = [&, last = static_cast<float>(position)](int row) {
        const float of_row = positions[static_cast<std::size_t>(row)];
        return of_row > last - kNeighbourhood && of_row <= last;
    };
    const auto leaves = [&](int row) { return row >= n_searched || !is_near(row); };
    near.erase(std::remove_if(near.begin(), near.end(), leaves), near.end());
    for (int row = n_searched; row < used(); ++row)
        if (is_near(row)) near.push_back(row);
    n_searched = count;
    return near;
}

RowMemory::RowMemory(const LayerShape& shape, ggml_type type, std::int64_t n_rows,
                     ggml_backend_buffer_type_t memory)
    : context_(ggml_init({2 * ggml_tensor_overhead(), nullptr, true})) {
    if (context_ == nullptr) throw std::bad_alloc();
    k_ = ggml_new_tensor_2d(context_.get(), type, shape.k_dim, n_rows);
    if (!shape.latent) v_ = ggml_new_tensor_2d(context_.get(), type, shape.v_dim, n_rows);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), memory));
    if (buffer_ == nullptr) throw std::bad_alloc();
    // Masked rows are multiplied by 0, so they must hold numbers.
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

std::vector<std::unique_ptr<LayerRows>> LayerRows::of(const std::vector<Wanted>& layers,
                                                      ggml_type type, int n_places) {
    std::vector<std::unique_ptr<LayerRows>> all;
    while (all.size() < layers.size()) {
        const auto of_run = layers.begin() + static_cast<std::ptrdiff_t>(all.size());
        const LayerShape& shape = of_run->shape;
        const auto row_bytes =
            static_cast<std::size_t>(ggml_row_size(type, std::max(shape.k_dim, shape.v_dim)));
        const std::size_t most =
            std::min(kMostTensorBytes, ggml_backend_buft_get_max_size(of_run->memory));
        std::vector<std::vector<int>> head_rows;
        for (auto next = of_run; next != layers.end(); ++next) {
            head_rows.push_back(next->head_rows);
            const auto n_rows = static_cast<std::size_t>(rows_of_layers(head_rows, n_places));
            const bool fits = next->memory == of_run->memory && next->shape.k_dim == shape.k_dim &&
                              next->shape.v_dim == shape.v_dim &&
                              next->shape.latent == shape.latent && n_rows * row_bytes <= most;
            if (fits || next == of_run) continue;
            head_rows.pop_back();
            break;
        }
        const auto memory = std::make_shared<const RowMemory>(
            shape, type, rows_of_layers(head_rows, n_places), of_run->memory);
        std::int64_t first = 0;
        std::size_t left = memory->bytes();
        for (std::size_t i = 0; i < head_rows.size(); ++i) {
            const std::int64_t n_rows = rows_of_layer(head_rows[i], n_places);
            // The last layer also has the rows behind its own.
            const bool is_last = i + 1 == head_rows.size();
            const std::size_t bytes =
                is_last ? left : static_cast<std::size_t>(n_rows) * entry_bytes_of(shape, type);
            all.push_back(
                std::make_unique<LayerRows>(memory, first, bytes, head_rows[i], n_places));
            left -= bytes;
            first += n_rows;
        }
    }
    return all;
}

LayerRows::LayerRows(std::shared_ptr<const RowMemory> memory, std::int64_t first, std::size_t bytes,
                     const std::vector<int>& head_rows, int n_places)
    : memory_(std::move(memory)),
      first_(first),
      bytes_(bytes),
      head_rows_(head_rows),
      n_places_(n_places),
      context_(ggml_init({2 * ggml_tensor_overhead(), nullptr, true})) {
    if (context_ == nullptr) throw std::bad_alloc();
    k_ = part_of(memory_->k());
    v_ = part_of(memory_->v());
}

// Returns this layer's rows, with those that attention may read behind them.
ggml_tensor* LayerRows::part_of(ggml_tensor* all) {
    if (all == nullptr) return nullptr;
    ggml_tensor* part = ggml_new_tensor_2d(context_.get(), all->type, all->ne[0],
                                           rows_of_layers({head_rows_}, n_places_));
    char* data = static_cast<char*>(all->data) + static_cast<std::size_t>(first_) * all->nb[1];
    if (ggml_backend_tensor_alloc(all->buffer, part, data) != GGML_STATUS_SUCCESS)
        throw std::bad_alloc();
    return part;
}

int LayerRows::of_place() const { return std::accumulate(head_rows_.begin(), head_rows_.end(), 0); }

DeviceLayer::DeviceLayer(const LayerShape& shape, const LayerRows& rows, int place, bool alone)
    : shape_(shape), all_(rows), place_(place) {
    int first_row = place * rows.of_place();
    for (int head = 0; head < shape.n_head_kv; ++head) {
        const int n_rows = rows.head_rows().at(static_cast<std::size_t>(head));
        if (alone || groups_.empty() || heads_.back().rows() != n_rows)
            groups_.push_back({head, 0});
        ++groups_.back().n_heads;
        DeviceHead& added = heads_.emplace_back();
        added.first_row = first_row;
        added.positions.assign(static_cast<std::size_t>(n_rows), kFreeRow);
        first_row += n_rows;
    }
    lay_out_positions(full_widths());
    for (DeviceHead& head : heads_) head.first_sum = head.first_position;
    n_sums_ = n_positions_;
}

std::size_t DeviceLayer::bytes() const {
    const auto n = static_cast<std::size_t>(all_.n_places());
    return (all_.bytes() + n - 1) / n;
}

int DeviceLayer::width_of(const DeviceGroup& group, int n_tokens) const {
    int used = 1;
    for (int i = 0; i < group.n_heads; ++i)
        used =
            std::max(used, heads_[static_cast<std::size_t>(group.first_head + i)].count + n_tokens);
    return whole_steps(used);
}

void DeviceLayer::lay_out_positions(const std::vector<int>& widths) {
    n_positions_ = 0;
    for (std::size_t number = 0; number < groups_.size(); ++number) {
        const DeviceGroup& group = groups_[number];
        for (int i = 0; i < group.n_heads; ++i, n_positions_ += widths.at(number))
            heads_[static_cast<std::size_t>(group.first_head + i)].first_position = n_positions_;
    }
}

std::vector<int> DeviceLayer::full_widths() const {
    std::vector<int> widths;
    for (const DeviceGroup& group : groups_)
        widths.push_back(whole_steps(heads_[static_cast<std::size_t>(group.first_head)].rows()));
    return widths;
}

std::vector<int> DeviceLayer::widths(int n_tokens) const {
    std::vector<int> widths;
    for (const DeviceGroup& group : groups_) widths.push_back(width_of(group, n_tokens));
    return widths;
}

bool DeviceLayer::is_even(const DeviceGroup& group) const {
    const auto first = heads_.begin() + group.first_head;
    return std::all_of(first, first + group.n_heads,
                       [&](const DeviceHead& head) { return head.count == first->count; });
}

int DeviceLayer::sum_stride(const DeviceGroup& group) const {
    return whole_steps(heads_[static_cast<std::size_t>(group.first_head)].rows());
}

int DeviceLayer::position_stride(const DeviceGroup& group) const {
    const auto next = static_cast<std::size_t>(group.first_head + 1);
    const int end = next < heads_.size() ? heads_[next].first_position : n_positions_;
    return end - heads_[next - 1].first_position;
}

std::size_t SingleSteps::bytes() const {
    std::size_t sum = written.capacity();
    for (const auto* memory : {&masks, &input, &queries})
        if (*memory != nullptr) sum += (*memory)->bytes();
    return sum;
}

bool DevicePlaces::can_take(int place, const std::vector<int>& budgets) const {
    const auto found = taken_.find(place);
    return (found == taken_.end() || !found->second) && budgets.size() == budgets_.size() &&
           std::equal(budgets.begin(), budgets.end(), budgets_.begin(), std::less_equal<>());
}

}  // namespace entropykv
