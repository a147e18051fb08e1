// Measures the prompt kernels alone, in CPU time of one thread: attention of tiles of 64 query rows
// over one head's entries, and then what the queries give to the entries, from weights that were
// kept or computed again.
#include <ctime>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.hpp"
#include "page/page_codec.hpp"

namespace {

using namespace entropykv;  // NOLINT: a benchmark of all of it

constexpr int kPage = 16;
constexpr int kPasses = 15;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class Bench {
public:
    Bench(const KernelTable& kernels, KvType type, int dim, int entries)
        : kernels_(kernels),
          layout_(make_page_layout(type, dim, dim, kPage)),
          memory_(index(entries / kPage) * layout_.bytes / sizeof(float) + 16),
          query_(index(dim * kRowTile)),
          scratch_(prompt_scratch_floats(layout_)),
          output_(index(layout_.v_stride * kRowTile)),
          observed_(index(entries)) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        std::vector<float> row(index(dim));
        auto* next = reinterpret_cast<std::byte*>(memory_.data());
        for (int i = 0; i < entries; ++i) {
            if (i % kPage == 0) pages_.push_back(next + index(i / kPage) * layout_.bytes);
            auto* page = const_cast<std::byte*>(pages_.back());
            for (float& value : row) value = normal(random);
            kernels.store_k(layout_, page, i % kPage, row.data());
            kernels.store_v(layout_, page, i % kPage, row.data());
            layout_.positions(page)[i % kPage] = i;
        }
        for (float& value : query_) value = 0.2f * normal(random);
        for (int r = 0; r < kRowTile; ++r) {
            positions_[r] = static_cast<float>(entries + r);
            weights_[r] = 1.0f;
        }
        task_.entries = {&layout_, pages_.data(), 0, entries};
        kept_.resize(kept_floats(task_.entries));
        task_.query = query_.data();
        task_.row_positions = positions_;
        task_.row_oldest = oldest_;
        task_.rows = kRowTile;
        task_.scratch = scratch_.data();
        task_.state = {max_, sum_, weighted_, output_.data()};
    }

    // Returns the nanoseconds for one query row and one entry.
    double attend(bool keep) {
        task_.kept = keep ? kept_.data() : nullptr;
        return fastest([&] {
            std::fill(max_, max_ + kRowTile, kMaskedLogit);
            std::fill(sum_, sum_ + kRowTile, 0.0f);
            std::fill(output_.begin(), output_.end(), 0.0f);
            kernels_.prompt(task_);
        });
    }
    double observe(bool kept) {
        task_.kept = kept ? kept_.data() : nullptr;
        return fastest([&] {
            kernels_.prompt_observe(task_, Statistic::squared_probability, weights_, 1.0f,
                                    observed_.data());
        });
    }

private:
    template <typename Work>
    double fastest(Work work) const {
        double best = 1e9;
        for (int pass = 0; pass < kPasses; ++pass) {
            const double start = thread_seconds();
            int runs = 0;
            for (; thread_seconds() - start < 0.01; ++runs) work();
            best = std::min(best, (thread_seconds() - start) / runs);
        }
        return 1e9 * best / kRowTile / (task_.entries.last - task_.entries.first);
    }

    const KernelTable& kernels_;
    PageLayout layout_;
    std::vector<float> memory_, query_, scratch_, output_, observed_, kept_;
    std::vector<const std::byte*> pages_;
    float positions_[kRowTile], oldest_[kRowTile]{}, weights_[kRowTile];
    float max_[kRowTile], sum_[kRowTile], weighted_[kRowTile]{};
    PromptTask task_{};
};

}  // namespace

// Usage: prompt_bench [dim ...]
int main(int argc, char** argv) {
    std::vector<int> dims;
    for (int i = 1; i < argc; ++i) dims.push_back(std::atoi(argv[i]));
    if (dims.empty()) dims = {64, 128};
    std::printf(
        "| kernels | K and V | head size | entries | attention, ns | GFLOPS | observed again, ns | "
        "observed as kept, ns |\n|---|---|---|---|---|---|---|---|\n");
    for (const KernelTable* kernels : available_kernels()) {
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl}) {
            for (const int dim : dims) {
                for (const int entries : {1536, 6144}) {
                    Bench bench(*kernels, type, dim, entries);
                    const double attend = bench.attend(true);
                    const double kept = bench.observe(true);
                    const double again = bench.observe(false);
                    std::printf("| %s | %s | %d | %d | %.2f | %.0f | %.2f | %.2f |\n",
                                kernels->name, codec_of(type).name, dim, entries, attend,
                                4.0 * dim / attend, again, kept);
                }
            }
        }
    }
    return 0;
}
