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

// Collects rows of a head's features one by one, and adds the products of many at a time.
class FeatureRows {
public:
    FeatureRows(const FeatureShape& shape, std::size_t n_values, double* sums,
                const KernelTable& kernels, float* scratch) noexcept
        : shape_(shape),
          n_values_(n_values),
          sums_(sums),
          kernels_(kernels),
          rows_(scratch),
          stride_(padded(n_values)) {
        std::fill_n(rows_, kRows * stride_, 0.0f);
    }

    // Adds an entry with the share of attention that it was given. rotation: rotates its key back
    // to position 0.
    void add(const PageLayout& layout, const std::byte* page, int slot, const float* rotation,
             float observed) noexcept {
        load_k(layout, page, slot, key_);
        if (shape_.v_dim > 0) load_v(layout, page, slot, value_);
        float* row = rows_ + n_rows_ * stride_;
        kernels_.features(shape_, key_, value_, rotation, row);
        row[n_values_ - 1] = std::log(std::max(observed, kLeastObserved));
        if (!is_finite(row, n_values_)) return;  // the next entry overwrites its row
        if (++n_rows_ == kRows) flush();
    }
    void flush() noexcept {
        if (n_rows_ == 0) return;
        kernels_.add_products(rows_, static_cast<int>(n_rows_), static_cast<int>(stride_),
                              static_cast<int>(n_values_), sums_);
        n_rows_ = 0;
    }

    static constexpr std::size_t kRows = 64;  // rows that are multiplied at once, in float

private:
    const FeatureShape& shape_;
    std::size_t n_values_;
    double* sums_;
    const KernelTable& kernels_;
    float* rows_;
    std::size_t stride_;
    std::size_t n_rows_ = 0;
    float key_[kMaxHeadDim];
    float value_[kMaxHeadDim];
};

}  // namespace

std::size_t LessonSums::scratch_values() const { return FeatureRows::kRows * most_values_; }

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
    FeatureRows rows(of.shape, of.n_values, of.sums[head].data(), kernels, scratch);
    for (int i = 0; i < staged.count; ++i) {
        const std::byte* page = staged.pages[layout.page_of(i)];
        const int slot = layout.slot_of(i);
        if (layout.positions(page)[slot] < n_sinks) continue;
        rows.add(layout, page, slot, inverse_rope.of(i), observed[i]);
    }
    rows.flush();
}

void LessonSums::add_stored(std::size_t layer, std::size_t number, const Head& head,
                            std::int32_t begin, std::int32_t end,
                            const StoredInverseRope& inverse_rope, const KernelTable& kernels,
                            float* scratch) noexcept {
    Layer& of = layers_[layer];
    FeatureRows rows(of.shape, of.n_values, of.sums[number].data(), kernels, scratch);
    const PageLayout& layout = head.layout();
    head.for_each_page({}, [&](std::byte* page, int n, int first) {
        const float* importance = head.importance_of(page, first);
        for (int i = 0; i < n; ++i) {
            const std::int32_t position = layout.positions(page)[i];
            if (position < begin || position >= end) continue;
            const float share = PackedImportance(importance[i]).share();
            rows.add(layout, page, i, inverse_rope.of(position), share);
        }
    });
    rows.flush();
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
