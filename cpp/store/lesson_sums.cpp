#include "store/lesson_sums.hpp"

#include <algorithm>
#include <cmath>

#include "platform/scratch.hpp"

namespace entropykv {
namespace {

constexpr float kLeastObserved = 1e-5f;
constexpr std::size_t kRowUnit = 16;  // Rows are padded to whole vectors of every instruction set.

std::size_t padded(std::size_t n) { return (n + kRowUnit - 1) / kRowUnit * kRowUnit; }

std::size_t triangle(std::size_t n) { return n * (n + 1) / 2; }

bool is_finite(const float* values, std::size_t n) {
    return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

}  // namespace

void LessonSums::add_layer(const FeatureShape& shape, int n_heads) {
    const std::size_t n = static_cast<std::size_t>(shape.n) + 1;
    layers_.push_back({shape, n, {}});
    layers_.back().sums.assign(static_cast<std::size_t>(n_heads),
                               std::vector<double>(triangle(n), 0.0));
    most_values_ = std::max(most_values_, padded(n));
}

void LessonSums::add(std::size_t layer, std::size_t head, const PageLayout& layout,
                     const StagedEntries& staged, const InverseRope& inverse_rope,
                     const float* observed, int n_sinks, const KernelTable& kernels,
                     float* scratch) noexcept {
    Layer& of = layers_[layer];
    const std::size_t stride = padded(of.n_values);
    std::fill_n(scratch, kRows * stride, 0.0f);
    std::size_t n_rows = 0;
    const auto flush = [&] {
        kernels.add_products(scratch, static_cast<int>(n_rows), static_cast<int>(stride),
                             static_cast<int>(of.n_values), of.sums[head].data());
        n_rows = 0;
    };
    float key[kMaxHeadDim];
    float value[kMaxHeadDim];
    for (int i = 0; i < staged.count; ++i) {
        const std::byte* page = staged.pages[layout.page_of(i)];
        const int slot = layout.slot_of(i);
        if (layout.positions(page)[slot] < n_sinks) continue;
        load_k(layout, page, slot, key);
        if (of.shape.v_dim > 0) load_v(layout, page, slot, value);
        float* row = scratch + n_rows * stride;
        kernels.features(of.shape, key, value, inverse_rope.of(i), row);
        row[of.n_values - 1] = std::log(std::max(observed[i], kLeastObserved));
        if (!is_finite(row, of.n_values)) continue;  // the next entry overwrites its row
        if (++n_rows == kRows) flush();
    }
    if (n_rows > 0) flush();
}

void LessonSums::clear() {
    for (Layer& layer : layers_)
        for (std::vector<double>& sums : layer.sums) std::fill(sums.begin(), sums.end(), 0.0);
}

// The last feature is always 1, so its sum of squares is the number of entries.
std::size_t LessonSums::count(std::size_t layer) const {
    const Layer& of = layers_.at(layer);
    double most = 0.0;
    for (const std::vector<double>& sums : of.sums)
        most = std::max(most, sums[triangle(of.n_values - 1) - 1]);
    return static_cast<std::size_t>(most);
}

std::vector<double> LessonSums::sums(std::size_t layer) const {
    const Layer& of = layers_.at(layer);
    const std::size_t n = of.n_values;
    std::vector<double> all(of.sums.size() * n * n);
    for (std::size_t head = 0; head < of.sums.size(); ++head) {
        const double* sum = of.sums[head].data();
        double* square = all.data() + head * n * n;
        for (std::size_t i = 0; i < n; ++i)
            for (std::size_t j = 0; j <= i; ++j) square[i * n + j] = square[j * n + i] = *sum++;
    }
    return all;
}

std::size_t LessonSums::bytes() const {
    std::size_t bytes = 0;
    for (const Layer& layer : layers_)
        for (const std::vector<double>& sums : layer.sums) bytes += bytes_of(sums);
    return bytes;
}

}  // namespace entropykv
