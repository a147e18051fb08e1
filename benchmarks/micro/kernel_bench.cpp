// Measures the decode kernel alone, in alternation with a plain read of the same bytes by as many
// threads. Every pass reads `working set` MiB of pages, spread over enough heads, so that the
// caches hold no more of them than between two passes through a real model.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.hpp"
#include "page/page_codec.hpp"

namespace {

using namespace entropykv;  // NOLINT: a benchmark of all of it

constexpr int kPage = 16;
constexpr int kUnit = 256;  // the entries of one call of the kernel

struct Options {
    std::vector<int> dims{64, 80, 96, 128};
    std::vector<int> groups{1, 3, 4, 8};
    std::vector<int> entries{1024, 4096, 16384, 131072};
    std::vector<std::string> types{"f16", "q8_0"};
    std::vector<std::string> kernels;  // empty: all of them
    int threads = 1;
    int mebibytes = 256;
    int passes = 7;
};

std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::vector<std::string> words(const std::string& list) {
    std::vector<std::string> out(1);
    for (const char c : list) {
        if (c == ',') {
            out.emplace_back();
        } else {
            out.back() += c;
        }
    }
    return out;
}

std::vector<int> numbers(const std::string& list) {
    std::vector<int> out;
    for (const std::string& word : words(list)) out.push_back(std::atoi(word.c_str()));
    return out;
}

[[noreturn]] void usage() {
    std::fprintf(stderr,
                 "usage: kernel_bench [--dims 64,80] [--groups 1,3] [--entries 1024,4096]\n"
                 "                    [--types f16,q8_0] [--kernels avx2,portable] [--threads 1]\n"
                 "                    [--mebibytes 256] [--passes 7]\n");
    std::exit(2);
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        if (i + 1 == argc) usage();
        const std::string value = argv[i + 1];
        if (name == "--dims")
            options.dims = numbers(value);
        else if (name == "--groups")
            options.groups = numbers(value);
        else if (name == "--entries")
            options.entries = numbers(value);
        else if (name == "--types")
            options.types = words(value);
        else if (name == "--kernels")
            options.kernels = words(value);
        else if (name == "--threads")
            options.threads = std::max(1, std::atoi(value.c_str()));
        else if (name == "--mebibytes")
            options.mebibytes = std::max(0, std::atoi(value.c_str()));
        else if (name == "--passes")
            options.passes = std::max(1, std::atoi(value.c_str()));
        else
            usage();
    }
    return options;
}

// Holds `heads` heads of `entries` entries in pages that lie one after another in memory.
class Pages {
public:
    Pages(KvType type, int dim, int entries, std::size_t least_bytes)
        : layout_(make_page_layout(type, dim, dim, kPage)), entries_(entries) {
        const std::size_t of_head = index(entries / kPage) * layout_.bytes;
        heads_ = static_cast<int>(std::max<std::size_t>(1, least_bytes / of_head));
        bytes_ = index(heads_) * of_head;
        memory_ = static_cast<std::byte*>(
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (memory_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        madvise(memory_, bytes_, MADV_HUGEPAGE);
#endif
        fill();
    }
    ~Pages() { munmap(memory_, bytes_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    const PageLayout& layout() const { return layout_; }
    std::size_t bytes() const { return bytes_; }
    const std::byte* memory() const { return memory_; }
    int entries() const { return entries_; }
    int total_entries() const { return heads_ * entries_; }
    const std::byte* const* pages() const { return pages_.data(); }

private:
    void fill() {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        const KernelTable& kernels = *available_kernels().back();
        std::vector<float> row(index(layout_.k_dim));
        const std::size_t n = bytes_ / layout_.bytes;
        for (std::size_t i = 0; i < n; ++i) {
            std::byte* page = memory_ + i * layout_.bytes;
            pages_.push_back(page);
            if (i >= 64) {  // 64 different pages are enough
                std::memcpy(page, pages_[i % 64], layout_.bytes);
                continue;
            }
            for (int slot = 0; slot < kPage; ++slot) {
                for (float& value : row) value = normal(random);
                kernels.store_k(layout_, page, slot, row.data());
                kernels.store_v(layout_, page, slot, row.data());
            }
        }
    }

    PageLayout layout_;
    int entries_;
    int heads_ = 0;
    std::size_t bytes_ = 0;
    std::byte* memory_ = nullptr;
    std::vector<const std::byte*> pages_;
};

// Times several passes over units 0 to n - 1. With one thread, every slice of units is timed by
// itself and counts with its fastest pass, so that other processes disturb less. With several
// threads, the fastest whole pass counts.
class Timer {
public:
    Timer(int threads, int n_units, int n_slices)
        : threads_(threads), n_units_(n_units), slices_(index(threads > 1 ? 1 : n_slices), 1e9) {}

    void pass(const std::function<void(int)>& unit) {
        const auto n = static_cast<int>(slices_.size());
        for (int i = 0; i < n; ++i) {
            const auto start = std::chrono::steady_clock::now();
            run(split(i, n), split(i + 1, n), unit);
            const auto elapsed = std::chrono::steady_clock::now() - start;
            slices_[index(i)] =
                std::min(slices_[index(i)], std::chrono::duration<double>(elapsed).count());
        }
    }

    double seconds() const { return std::accumulate(slices_.begin(), slices_.end(), 0.0); }

private:
    int split(int i, int n) const {
        return static_cast<int>(static_cast<std::int64_t>(n_units_) * i / n);
    }

    void run(int first, int last, const std::function<void(int)>& unit) const {
        std::atomic<int> next{first};
        const auto work = [&] {
            for (int i = next.fetch_add(1); i < last; i = next.fetch_add(1)) unit(i);
        };
        std::vector<std::thread> others;
        for (int t = 1; t < threads_; ++t) others.emplace_back(work);
        work();
        for (std::thread& other : others) other.join();
    }

    int threads_;
    int n_units_;
    std::vector<double> slices_;
};

std::atomic<std::uint64_t> sink{0};

constexpr std::size_t kReadUnit = 64 * 1024;

void read_unit(const Pages& pages, int i) {
    const auto* words =
        reinterpret_cast<const std::uint64_t*>(pages.memory() + index(i) * kReadUnit);
    // There are several sums, so that an addition need not wait for the one before it.
    std::uint64_t sums[32] = {};
    for (std::size_t j = 0; j < kReadUnit / sizeof(std::uint64_t); j += 32)
        for (std::size_t lane = 0; lane < 32; ++lane) sums[lane] += words[j + lane];
    std::uint64_t total = 0;
    for (const std::uint64_t sum : sums) total += sum;
    sink.fetch_add(total, std::memory_order_relaxed);
}

void decode_unit(const Pages& pages, const KernelTable& kernels, const std::vector<float>& query,
                 int rows, int entries, int i) {
    const PageLayout& layout = pages.layout();
    thread_local std::vector<float> state;
    state.assign(index(rows * (layout.v_stride + 3)), 0.0f);
    std::fill(state.begin(), state.begin() + rows, kMaskedLogit);
    DecodeTask task{};
    task.entries = {&layout, pages.pages(), i * entries, (i + 1) * entries};
    task.query = query.data();
    task.rows = rows;
    task.oldest = kMaskedLogit;
    task.state = {state.data(), state.data() + rows, state.data() + 2 * rows,
                  state.data() + 3 * rows};
    if ((i + 2) * entries <= pages.total_entries())
        task.upcoming = {&layout, pages.pages(), (i + 1) * entries, (i + 2) * entries};
    kernels.decode(task);
}

void measure(const Options& options, const Pages& pages, const std::string& type, int rows) {
    for (const KernelTable* kernels : available_kernels()) {
        const auto& names = options.kernels;
        if (!names.empty() && std::find(names.begin(), names.end(), kernels->name) == names.end())
            continue;
        const int unit = std::min(kUnit, pages.entries());
        const auto slices = static_cast<int>(pages.bytes() >> 20) + 1;
        Timer reading(options.threads, static_cast<int>(pages.bytes() / kReadUnit), slices);
        Timer decoding(options.threads, pages.total_entries() / unit, slices);
        const std::vector<float> query(index(rows * pages.layout().k_stride),
                                       1.0f / std::sqrt(static_cast<float>(pages.layout().k_dim)));
        for (int pass = 0; pass < options.passes; ++pass) {
            reading.pass([&](int i) { read_unit(pages, i); });
            decoding.pass([&](int i) { decode_unit(pages, *kernels, query, rows, unit, i); });
        }
        const double read = reading.seconds();
        const double decode = decoding.seconds();
        const double gigabytes = 1e-9 * static_cast<double>(pages.bytes());
        std::printf("%-8s %-5s %4d %5d %8d %9.2f %8.1f %8.1f %6.0f %%\n", kernels->name,
                    type.c_str(), pages.layout().k_dim, rows, pages.entries(),
                    1e9 * decode / pages.total_entries(), gigabytes / decode, gigabytes / read,
                    100.0 * read / decode);
        std::fflush(stdout);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const Options options = parse(argc, argv);
    std::printf("%-8s %-5s %4s %5s %8s %9s %8s %8s %8s\n", "kernels", "type", "dim", "group",
                "entries", "ns/entry", "GB/s", "read", "share");
    for (const int dim : options.dims)
        for (const std::string& type : options.types)
            for (const int entries : options.entries) {
                const Pages pages(kv_type_named(type), dim, (entries + kPage - 1) / kPage * kPage,
                                  index(options.mebibytes) << 20);
                for (const int rows : options.groups) measure(options, pages, type, rows);
            }
    return 0;
}
