#include "cold_head.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "importance.hpp"
#include "prefetch.hpp"

namespace entropykv {
namespace {

constexpr int kOfCluster = 2;  // entries of a page for every mean
constexpr int kRounds = 4;     // of clustering

}  // namespace

ColdLayout::ColdLayout(ColdType type, const PageLayout& hot)
    : page(hot),
      summary(make_page_layout(KvType::q8_0, hot.k_dim, 1, kGroupEntries)),
      n_means(hot.entries / kOfCluster),
      codec(type, hot) {}

ColdHead::ColdHead(const ColdLayout& layout, ColdStorage& storage, std::size_t most_pages)
    : layout_(&layout),
      storage_(&storage),
      most_pages_(most_pages),
      open_rows_(layout.page.bytes),
      packed_(storage.page_bytes()),
      keys_(index(layout.page.entries * layout.page.k_dim)),
      means_(index(layout.n_means * layout.page.k_dim)),
      clusters_(index(layout.page.entries)) {}

void ColdHead::prepare(int n_new) {
    const std::size_t n_pages = index(n_new / per_page() + 2);
    make_room(pages_, pages_.size() + n_pages);
    records_.reserve(pages_.capacity() * index(per_page()));
    make_room(free_pages_, pages_.capacity());
    while (summaries_.size() * kGroupEntries < pages_.capacity() * index(layout_->n_means))
        summaries_.emplace_back(layout_->summary.bytes);
    make_room(spare_, pages_.capacity());
    const std::size_t room = most_pages_ == 0 ? n_pages : most_pages_ - n_stored_;
    while (spare_.size() < std::min(n_pages, room)) spare_.push_back(storage_->take());
}

// ------------------------------------------------------------------------------------------------
// entries

int ColdHead::add(const std::byte* page, int slot, const ColdRecord& record, float decay,
                  const KernelTable& kernels) noexcept {
    dropped_page_ = kNone;
    n_dropped_ = 0;
    if (open_ == kNone || n_open_ == per_page()) {
        if (open_ != kNone) {
            if (most_pages_ != 0 && n_stored_ >= most_pages_)
                drop_page(least_page(decay, record.frozen_at));
            close_open(kernels);
        }
        open_next();
    }
    copy_entry(layout_->page, page, slot, open_rows_.data(), n_open_);
    const int number = open_ * per_page() + n_open_++;
    records_.positions[index(number)] = record.position;
    ++page_of(number).n_records;
    freeze(number, record.importance, record.frozen_at, record.due, record.detections);
    return number;
}

void ColdHead::open_next() noexcept {
    if (free_pages_.empty()) {
        free_pages_.push_back(n_pages());
        pages_.emplace_back();
        records_.resize(pages_.size() * index(per_page()));
    }
    // The lowest number, whichever became free first: a session that is loaded takes the same.
    const auto lowest = std::min_element(free_pages_.begin(), free_pages_.end());
    open_ = *lowest;
    *lowest = free_pages_.back();
    free_pages_.pop_back();
    n_open_ = 0;
}

void ColdHead::close_open(const KernelTable& kernels) noexcept {
    pack(open_, open_rows_.data(), kernels);
    store(open_, packed_.data());
}

// Into packed_. The summary is of what is read back: the same for a session that is loaded.
void ColdHead::pack(int page, std::byte* rows, const KernelTable& kernels) noexcept {
    layout_->codec.pack(rows, packed_.data());
    if (!layout_->codec.as_stored()) layout_->codec.unpack(packed_.data(), kernels, rows);
    summarise(page, rows, kernels);
}

void ColdHead::store(int number, const std::byte* packed) noexcept {
    Page& page = pages_[index(number)];
    page.place = spare_.back();
    spare_.pop_back();
    page.stored = true;
    ++n_stored_;
    storage_->write(page.place, packed);
}

void ColdHead::freeze(int number, float importance, std::int32_t now, std::int32_t due,
                      Detections detections) noexcept {
    records_.importance[index(number)] = importance;
    records_.frozen_at[index(number)] = now;
    records_.dues[index(number)] = due;
    records_.detections[index(number)] = detections;
    ++page_of(number).n_frozen;
    ++n_frozen_;
}

void ColdHead::restore(int number) noexcept {
    records_.frozen_at[index(number)] = kActive;
    records_.dues[index(number)] = kNever;
    --page_of(number).n_frozen;
    --n_frozen_;
}

const std::byte* ColdHead::read(int page, const KernelTable& kernels, std::byte* buffer) noexcept {
    if (page == open_) return open_rows_.data();
    std::byte* packed = buffer + layout_->page.bytes;
    const std::byte* stored = storage_->read(pages_[index(page)].place, packed);
    if (stored == nullptr || layout_->codec.as_stored()) return stored;
    layout_->codec.unpack(stored, kernels, buffer);
    return buffer;
}

void ColdHead::ask_for_due(std::int32_t now) const noexcept {
    ask_for(reinterpret_cast<const std::byte*>(records_.importance.data()),
            records_.size() * sizeof(float));
    ask_for(reinterpret_cast<const std::byte*>(records_.detections.data()),
            records_.size() * sizeof(Detections));
    if (!in_place()) return;
    for (int page = 0; page < n_pages(); ++page) {
        if (n_frozen(page) == 0) continue;
        const std::byte* rows = page == open_
                                    ? open_rows_.data()
                                    : storage_->read(pages_[index(page)].place, nullptr);
        for (int slot = 0; slot < per_page(); ++slot)
            if (due(page * per_page() + slot, now)) ask_for_value(layout_->page, rows, slot);
    }
}

int ColdHead::count_due(std::int32_t now) const {
    return static_cast<int>(std::count_if(records_.dues.begin(), records_.dues.end(),
                                          [now](std::int32_t due) { return due <= now; }));
}

// ------------------------------------------------------------------------------------------------
// summaries

// Gives every key the cluster whose mean is nearest, and the clusters their means; returns how many
// keys changed. clusters_ holds what was before.
int ColdHead::assign_clusters() noexcept {
    const int n_clusters = layout_->n_means;
    const int dim = layout_->page.k_dim;
    int n_changed = 0;
    for (int slot = 0; slot < per_page(); ++slot) {
        const float* key = keys_.data() + slot * dim;
        int nearest = 0;
        float least = 0.0f;
        for (int c = 0; c < n_clusters; ++c) {
            const float* mean = means_.data() + c * dim;
            float distance = 0.0f;
            for (int d = 0; d < dim; ++d) distance += (key[d] - mean[d]) * (key[d] - mean[d]);
            if (c > 0 && distance >= least) continue;
            nearest = c;
            least = distance;
        }
        if (clusters_[index(slot)] != nearest) ++n_changed;
        clusters_[index(slot)] = nearest;
    }
    for (int c = 0; c < n_clusters; ++c) {
        const auto size = static_cast<float>(std::count(clusters_.begin(), clusters_.end(), c));
        float* mean = means_.data() + c * dim;
        if (size > 0.0f) std::fill(mean, mean + dim, 0.0f);
        for (int slot = 0; slot < per_page(); ++slot)
            for (int d = 0; clusters_[index(slot)] == c && d < dim; ++d)
                mean[d] += keys_[index(slot * dim + d)] / size;
    }
    return n_changed;
}

void ColdHead::summarise(int page, const std::byte* rows, const KernelTable& kernels) noexcept {
    const int dim = layout_->page.k_dim;
    for (int slot = 0; slot < per_page(); ++slot)
        load_k(layout_->page, rows, slot, keys_.data() + slot * dim);
    for (int c = 0; c < layout_->n_means; ++c)
        std::copy_n(keys_.begin() + c * kOfCluster * dim, dim, means_.begin() + c * dim);
    std::fill(clusters_.begin(), clusters_.end(), kNone);
    for (int round = 0; round < kRounds && assign_clusters() > 0;) ++round;
    for (int c = 0; c < layout_->n_means; ++c) {
        const int mean = page * layout_->n_means + c;
        const int slot = mean % kGroupEntries;
        const auto size = std::count(clusters_.begin(), clusters_.end(), c);
        kernels.store_k(layout_->summary, summary_of(mean), slot, means_.data() + c * dim);
        layout_->summary.importance(summary_of(mean))[slot] =
            size > 0 ? std::log(static_cast<float>(size)) : kMaskedLogit;
    }
}

std::int32_t ColdHead::newest_in(int page) const noexcept {
    std::int32_t newest = 0;
    for (int i = page * per_page(); i < (page + 1) * per_page(); ++i)
        newest = std::max(newest, position(i));
    return newest;
}

void ColdHead::estimate(const KernelTable& kernels, const QueryRows& queries, const float* masses,
                        float* logits, float* out) const noexcept {
    std::fill_n(out, n_pages(), kMaskedLogit);
    const int n = n_pages() * layout_->n_means;
    for (int first = 0; first < n; first += kGroupEntries) {
        const std::byte* summary = summaries_[index(first / kGroupEntries)].data();
        const float* sizes = layout_->summary.importance(summary);
        kernels.products(layout_->summary, summary, queries.data, queries.n, logits, kGroupEntries);
        const int n_means = std::min(kGroupEntries, n - first);
        std::int32_t newest[kGroupEntries] = {};  // of the pages: where a bias is least
        for (int i = 0; queries.slopes != nullptr && i < n_means; ++i)
            newest[i] = newest_in((first + i) / layout_->n_means);
        for (int r = 0; r < queries.n; ++r) {
            for (int i = 0; i < n_means; ++i) {
                const float logit =
                    queries.adjusted(r, logits[r * kGroupEntries + i], newest[i]);
                float& of_page = out[(first + i) / layout_->n_means];
                of_page = std::max(of_page, logit + sizes[i] - masses[r]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------
// what goes

int ColdHead::least_page(float decay, std::int32_t now) const noexcept {
    int least = kNone;
    float least_worth = 0.0f;
    for (int page = 0; page < n_pages(); ++page) {
        if (!pages_[index(page)].stored) continue;
        float worth = 0.0f;
        for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
            const ColdRecord r = record(i);
            if (r.frozen()) worth += r.importance * decay_factor(decay, now - r.frozen_at);
        }
        if (least == kNone || worth < least_worth) {
            least = page;
            least_worth = worth;
        }
    }
    return least;
}

void ColdHead::drop_page(int page) noexcept {
    dropped_page_ = page;
    n_dropped_ = pages_[index(page)].n_frozen;
    for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
        if (frozen(i)) restore(i);
        records_.set(index(i), {});
    }
    spare_.push_back(pages_[index(page)].place);
    pages_[index(page)] = Page{};
    --n_stored_;
    free_pages_.push_back(page);
}

void ColdHead::truncate(std::int32_t from) {
    const std::int32_t now = from - 1;
    for (int page = 0; page < n_pages(); ++page) {
        Page& of = pages_[index(page)];
        for (int i = page * per_page(); i < (page + 1) * per_page(); ++i) {
            ColdRecord r = record(i);
            if (r.position >= from) {
                if (r.frozen()) restore(i);
                records_.set(index(i), {});
                --of.n_records;
            } else if (r.frozen() && r.frozen_at > now) {
                if (r.due != kNever) r.due = now + (r.due - r.frozen_at);
                r.frozen_at = now;
                records_.set(index(i), r);
            }
        }
        if (of.n_records == 0) free_page(page);
    }
}

// A page without records, if it is not free already.
void ColdHead::free_page(int page) {
    Page& of = pages_[index(page)];
    if (page == open_) {
        n_open_ = 0;
    } else if (of.stored) {
        storage_->release(of.place);
        of = Page{};
        --n_stored_;
        free_pages_.push_back(page);
    }
}

void ColdHead::clear_detections() {
    std::fill(records_.detections.begin(), records_.detections.end(), Detections{});
}

}  // namespace entropykv
