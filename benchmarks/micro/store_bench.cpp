// Measures eviction and compaction alone, in time per million entries: when a micro-batch comes to
// a full head, when its budget is halved, and when a sequence is truncated. Every figure is the
// fastest of several passes over all heads of a store.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "attention/attention.hpp"
#include "decide/budget.hpp"
#include "page/page_codec.hpp"

namespace {

using namespace entropykv;  // NOLINT: a benchmark of all of it

constexpr int kHeads = 8;
constexpr int kPasses = 5;
constexpr int kFillTokens = 512;

struct Case {
    KvType type;
    int dim;
    int budget;    // the entries of a head
    int n_tokens;  // the tokens of a micro-batch
};

double seconds(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class FullStore {
public:
    explicit FullStore(const Case& c) : case_(c), store_({shape(c)}, settings(c)) {
        set_budget(c.budget);
        observed_.resize(static_cast<std::size_t>(c.budget + c.n_tokens));
        std::mt19937 random(1);
        for (float& value : observed_) value = std::uniform_real_distribution<float>()(random);
        fill();
    }

    // Measures what one micro-batch does to a store whose heads are full.
    double evict() { return add(case_.n_tokens, observed_.data()); }

    double halve_budget() {
        const double time = seconds([&] { set_budget(case_.budget / 2); });
        set_budget(case_.budget);
        fill();
        return time;
    }

    double cut_back() {
        const double time = seconds([&] { store_.truncate(position_ - case_.budget / 4); });
        position_ -= case_.budget / 4;
        fill();
        return time;
    }

private:
    static LayerShape shape(const Case& c) { return {kHeads, kHeads, c.dim, c.dim}; }
    static StoreSettings settings(const Case& c) {
        StoreSettings settings;
        settings.type = c.type;
        settings.max_tokens = kFillTokens;
        settings.max_entries = 1 << 20;
        return settings;
    }

    void set_budget(int entries) {
        const int pages = pages_for(case_.budget, store_.layout(0).entries);
        store_.set_budgets(std::vector<int>(kHeads, entries),
                           static_cast<std::size_t>(kHeads * pages), {4, entries / 2});
    }

    void fill() {
        while (store_.head(0, 0).count() < case_.budget) add(kFillTokens, nullptr);
    }

    double add(int n_tokens, const float* observed) {
        store_.reserve(n_tokens, position_ + n_tokens - 1, false);
        stage(n_tokens);
        return seconds([&] {
            for (int h = 0; h < kHeads; ++h) store_.commit(0, h, n_tokens, observed, 0.0f, 0);
        });
    }

    // Stages tokens as attention does: rows and positions, without importance yet.
    void stage(int n_tokens) {
        const KernelTable& kernels = *available_kernels().back();
        const PageLayout& layout = store_.layout(0);
        const std::vector<float> row(static_cast<std::size_t>(case_.dim), 0.5f);
        for (int h = 0; h < kHeads; ++h)
            for (int i = 0; i < n_tokens; ++i) {
                std::byte* page = store_.staging(0, h)[i / layout.entries];
                const int slot = i % layout.entries;
                kernels.store_k(layout, page, slot, row.data());
                kernels.store_v(layout, page, slot, row.data());
                layout.positions(page)[slot] = position_ + i;
                layout.importance(page)[slot] = 0.0f;
            }
        position_ += n_tokens;
    }

    Case case_;
    HeadStore store_;
    std::vector<float> observed_;
    std::int32_t position_ = 0;
};

void measure(const Case& c) {
    FullStore store(c);
    double evicting = 1e9;
    double halving = 1e9;
    double cutting = 1e9;
    for (int pass = 0; pass < kPasses; ++pass) {
        evicting = std::min(evicting, store.evict());
        halving = std::min(halving, store.halve_budget());
        cutting = std::min(cutting, store.cut_back());
    }
    const auto per_million = [](double time, int entries) {
        return 1e3 * time / (1e-6 * kHeads * entries);
    };
    std::printf("%-5s %4d %7d %6d %12.1f %12.1f %12.1f\n", codec_of(c.type).name, c.dim, c.budget,
                c.n_tokens, per_million(evicting, c.budget + c.n_tokens),
                per_million(halving, c.budget), per_million(cutting, c.budget));
}

}  // namespace

int main() {
    std::printf("milliseconds per million entries that are looked at\n");
    std::printf("%-5s %4s %7s %6s %12s %12s %12s\n", "type", "dim", "budget", "tokens", "evict",
                "halve", "cut back");
    for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
        for (const int dim : {64, 128})
            for (const int budget : {1024, 16384, 65536})
                for (const int n_tokens : {16, 512}) measure({type, dim, budget, n_tokens});
    return 0;
}
