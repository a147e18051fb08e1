// Tests what happens when memory is short or large. Every allocation of the store fails once, and
// nothing is lost; ops of a graph allocate nothing; pools of any size are mapped at once, in few
// mappings; and the heap of cold storage is counted.
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
// After windows.h, whose types it uses.
#include <psapi.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>

#include "page/page_pool.hpp"
#include "platform/file_access.hpp"
#include "platform/mapped_file.hpp"
#include "platform/scratch.hpp"
#include "platform/system_memory.hpp"
#include "temporary_file.hpp"
#include "testing.hpp"

// These functions replace those of the machine: they count allocations, and let one of them fail.

namespace {

struct Machine {
    std::atomic<bool> counts{false};
    std::atomic<long> n{0};         // allocations while they are counted
    std::atomic<long> failing{-1};  // the number of the allocation that fails
    std::atomic<bool> in_op{false};
    std::atomic<long> of_ops{0};  // allocations by ops of a graph
    std::atomic<std::size_t> heap{0};

    bool refuses() {
        if (in_op) ++of_ops;
        return counts && n++ == failing;
    }
};
Machine machine;

constexpr std::size_t kSizeBytes = 16;  // before each allocated block

void* allocated(std::size_t size) {
    auto* start = static_cast<char*>(std::malloc(size + kSizeBytes));
    if (start == nullptr) return nullptr;
    std::memcpy(start, &size, sizeof size);
    machine.heap += heap_bytes(size);
    return start + kSizeBytes;
}

void released(void* pointer) {
    if (pointer == nullptr) return;
    char* start = static_cast<char*>(pointer) - kSizeBytes;
    std::size_t size = 0;
    std::memcpy(&size, start, sizeof size);
    machine.heap -= heap_bytes(size);
    std::free(start);
}

}  // namespace

void* operator new(std::size_t size) {
    void* pointer = machine.refuses() ? nullptr : allocated(size);
    if (pointer == nullptr) throw std::bad_alloc();
    return pointer;
}
void operator delete(void* pointer) noexcept { released(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { released(pointer); }

#if defined(__linux__)
extern "C" void* mmap(void* at, std::size_t n, int protection, int flags, int file, off_t offset) {
    if (machine.refuses()) return MAP_FAILED;
    const long found = syscall(SYS_mmap, at, n, protection, flags, file, offset);
    return reinterpret_cast<void*>(found);  // -1: MAP_FAILED
}
extern "C" int mprotect(void* at, std::size_t n, int protection) {
    if (machine.refuses()) return -1;
    return static_cast<int>(syscall(SYS_mprotect, at, n, protection));
}
#endif

namespace {

// In the following tests, every allocation fails once.

// Runs an action of the store again if memory was short; it must not be half done then.
template <typename Action>
void survive(Action action) {
    machine.counts = true;
    try {
        action();
    } catch (const std::bad_alloc&) {
        machine.counts = false;
        action();
    }
    machine.counts = false;
}

const LayerShape kShape{4, 2, 16, 24};

struct Sequence {
    Sequence(const StoreSettings& settings, std::shared_ptr<StorePool> pool)
        : store({kShape}, settings, std::move(pool)),
          attention(store, *available_kernels().back(), 1) {}

    void set_budget(int entries) {
        survive([&] { set_equal_budgets(store, entries); });
    }

    void read(int n, std::mt19937& random, std::vector<double>& numbers) {
        const auto q = random_rows(random, n * kShape.n_head * kShape.k_dim);
        const auto k = random_rows(random, n * kShape.n_head_kv * kShape.k_dim);
        const auto v = random_rows(random, n * kShape.n_head_kv * kShape.v_dim);
        std::vector<float> output(index(n * kShape.n_head * kShape.v_dim));
        AttentionParams params;
        params.scale = 0.25f;
        survive([&] { attention.begin({n, end, end}); });
        machine.in_op = true;
        attention.stage_k(0, view(k, kShape.n_head_kv, kShape.k_dim), 0, 1);
        attention.stage_v(0, view(v, kShape.n_head_kv, kShape.v_dim), 0, 1);
        attention.attend(0, 0, params, view(q, kShape.n_head, kShape.k_dim), output.data(), 0);
        attention.commit_due(0);
        machine.in_op = false;
        end += n;
        ::note(numbers, output);
    }

    void note(std::vector<double>& numbers) const {
        for (int head = 0; head < kShape.n_head_kv; ++head) {
            ::note(numbers, positions_of(store.head(0, head)));
            ::note(numbers, importance_of(store.head(0, head)));
            ::note(numbers, frozen_positions(store.head(0, head)));
        }
    }

    HeadStore store;
    Attention attention;
    std::int32_t end = 0;
};

std::unique_ptr<Sequence> make_sequence(const StoreSettings& settings,
                                        const std::shared_ptr<StorePool>& pool) {
    std::unique_ptr<Sequence> made;
    survive([&] { made = std::make_unique<Sequence>(settings, pool); });
    return made;
}

// Runs one sequence that shrinks and rolls back; frozen entries are restored by their timers, or
// all at once.
std::vector<double> run_alone(const StoreSettings& settings) {
    std::mt19937 random(1);
    std::vector<double> numbers;
    const auto sequence = make_sequence(settings, nullptr);
    sequence->set_budget(60);
    for (const int n : {70, 1, 1, 40, 1, 1}) sequence->read(n, random, numbers);
    sequence->set_budget(30);
    for (const int n : {1, 1, 50}) sequence->read(n, random, numbers);
    survive([&] { sequence->store.truncate(140); });
    sequence->end = 140;
    sequence->set_budget(90);
    FrozenHeads frozen(sequence->store.components());
    if (settings.freezing) {
        survive([&] { frozen.freeze_all(sequence->end - 1); });
        survive([&] { frozen.restore({-1, -1}, sequence->end - 1, false); });
    }
    for (const int n : {1, 80, 1}) sequence->read(n, random, numbers);
    sequence->note(numbers);
    return numbers;
}

// Loads what one sequence holds into another one, from a file that is mapped.
void go_on_from_file(const Sequence& from, Sequence& to) {
    TemporaryFile file;
    const HeadSaver saver(from.store.components());
    std::vector<int> counts;
    std::vector<std::vector<std::byte>> states;
    std::size_t end = 0;
    for (int head = 0; head < kShape.n_head_kv; ++head) {
        counts.push_back(from.store.head(0, head).count());
        states.emplace_back(saver.bytes(0, head));
        saver.save(0, head, states.back().data());
        states.back().resize(states.back().size() + saver.padding(0, head));
        CHECK(write_at(file.number, states.back().data(), states.back().size(), end));
        end += states.back().size();
    }
    std::shared_ptr<MappedFile> mapped;
    survive([&] {
        mapped = MappedFile::map(file.number, 0, end);
        if (!mapped && kMapsFiles) throw std::bad_alloc();
    });
    std::vector<const std::byte*> starts;
    std::size_t start = 0;
    for (const auto& state : states) {
        starts.push_back(mapped ? mapped->data() + start : state.data());
        start += state.size();
    }
    survive([&] { to.store.truncate(0); });
    HeadLoader loader(to.store.components());
    const std::vector<int> budgets{to.store.head(0, 0).budget(), to.store.head(0, 1).budget()};
    survive([&] { loader.begin(counts, starts, budgets); });
    bool adopted = false;
    if (mapped) survive([&] { adopted = loader.adopt(mapped, counts, starts); });
    CHECK(adopted == kMapsFiles);
    for (int head = 0; head < kShape.n_head_kv && !adopted; ++head)
        loader.load(0, head, counts[index(head)], states[index(head)].data());
    to.end = from.end;
}

// Runs sequences of one pool, which share pages with a checkpoint, evict from shared pages, and
// replace each other.
std::vector<double> run_in_company(const StoreSettings& settings) {
    std::mt19937 random(2);
    std::vector<double> numbers;
    std::shared_ptr<StorePool> pool;
    survive([&] {
        pool = std::make_shared<StorePool>(std::vector{kShape}, settings.type, kMaxTokens, 2);
    });
    survive([&] { pool->set_pages(40); });
    const auto first = make_sequence(settings, pool);
    const auto second = make_sequence(settings, pool);
    for (Sequence* sequence : {first.get(), second.get()}) sequence->set_budget(100);
    first->read(120, random, numbers);
    std::unique_ptr<Checkpoint> checkpoint;
    survive([&] { checkpoint = make_checkpoint(first->store.components()); });
    for (const int n : {1, 1, 60}) first->read(n, random, numbers);
    second->set_budget(70);
    survive([&] { CHECK(fork_from(second->store, *checkpoint, false)); });  // evicts
    second->end = 120;
    second->read(1, random, numbers);
    second->set_budget(40);  // evicts from pages that the checkpoint also owns
    second->read(30, random, numbers);
    survive([&] { first->store.truncate(100); });
    first->end = 100;
    survive([&] { CHECK(fork_from(first->store, *checkpoint, true)); });
    first->end = 120;
    first->read(20, random, numbers);
    survive([&] { pool->set_pages(pool->shared_pages()); });
    for (Sequence* sequence : {first.get(), second.get()}) {
        sequence->read(1, random, numbers);
        sequence->note(numbers);
    }
    CHECK(pool->pages().used_pages() <= pool->pages().budget_pages());
    survive([&] { pool->set_pages(60); });
    second->set_budget(100);
    go_on_from_file(*first, *second);
    second->read(30, random, numbers);
    second->note(numbers);
    return numbers;
}

template <typename Run>
void test_every_allocation_fails_once(const char* name, Run run) {
    machine.failing = -1;
    machine.n = machine.of_ops = 0;
    const std::vector<double> expected = run();
    const long all = machine.n;
    CHECK(all > 50);
    for (long number = 0; number < all; ++number) {
        machine.n = 0;
        machine.failing = number;
        const bool same = run() == expected;
        if (!same) check(false, (name + std::to_string(number)).c_str(), __FILE__, __LINE__);
    }
    machine.failing = -1;
    CHECK(machine.of_ops == 0);
    CHECK(run() == expected);
}

void test_full_machines() {
    for (const auto& freezing : freezings()) {
        StoreSettings settings = settings_of(KvType::q8_0, ScoreKind::mass);
        settings.freezing = freezing;
        test_every_allocation_fails_once("alone, allocation ", [&] { return run_alone(settings); });
    }
    for (const ScoreKind score : {ScoreKind::mass, ScoreKind::predicted}) {
        const StoreSettings settings = settings_of(KvType::f16, score);
        test_every_allocation_fails_once("in company, allocation ",
                                         [&] { return run_in_company(settings); });
    }
}

// The following tests use large pools.

// Returns 0 on a system without /proc.
int count_mappings() {
    std::ifstream maps("/proc/self/maps");
    std::string line;
    int n = 0;
    while (std::getline(maps, line)) ++n;
    return n;
}

// Returns the bytes of memory that the process has, or 0 on a system where this is not known.
std::size_t resident_bytes() {
#if defined(_WIN32)
    PROCESS_MEMORY_COUNTERS counters{};
    GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof counters);
    return counters.WorkingSetSize;
#else
    std::ifstream statm("/proc/self/statm");
    std::size_t all = 0, resident = 0;
    statm >> all >> resident;
    return resident * system_page_bytes();
#endif
}

double cpu_seconds() {
    return static_cast<double>(std::clock()) / static_cast<double>(CLOCKS_PER_SEC);
}

// The pool is larger than any machine, while Linux allows 65,530 mappings per process. Pages that
// are never written take only addresses there; Windows counts them, so that the pool is small.
void test_a_large_pool_is_mapped_at_once() {
    constexpr std::size_t kGib = std::size_t{1} << 30, kPage = 9216;
#if defined(_WIN32)
    constexpr std::size_t kPoolBytes = 2 * kGib;
#else
    constexpr std::size_t kPoolBytes = 64 * kGib;
#endif
    const int before = count_mappings();
    const double start = cpu_seconds();
    PagePool pool(kPage, kPoolBytes / kPage);
    pool.map(pool.budget_pages());
    CHECK(pool.mapped_bytes() >= pool.budget_bytes());
    CHECK(pool.mapped_bytes() < pool.budget_bytes() + 64 * kSlabBytes);
    CHECK(cpu_seconds() - start < 5.0);
    CHECK(count_mappings() - before < 300);
    pool.set_budget(0);
    pool.compact([](auto) {});
    CHECK(pool.mapped_bytes() == 0 && count_mappings() - before < 10);
}

void fill(std::byte* page, int number, std::size_t bytes) {
    std::memset(page, number % 251, bytes);
    std::memcpy(page, &number, sizeof number);
}

bool is_filled(const std::byte* page, int number, std::size_t bytes) {
    int found = -1;
    std::memcpy(&found, page, sizeof found);
    return found == number && page[bytes - 1] == std::byte(number % 251);
}

// The budget grows a little every time. Pages lie in many ranges, some with two owners, and all
// memory is given back.
void test_a_pool_that_grows_in_small_steps() {
    constexpr std::size_t kPage = 5000;
    constexpr int kPages = 20'000;  // about 100 MB
    PagePool pool(kPage, 0);
    const int before = count_mappings();
    std::vector<std::byte*> pages, twice;
    while (pages.size() < index(kPages)) {
        pool.set_budget(pool.budget_pages() + 50);
        while (std::byte* page = pool.allocate()) {
            fill(page, static_cast<int>(pages.size()), kPage);
            pages.push_back(page);
        }
    }
    CHECK(pages.size() == index(kPages) && count_mappings() - before < 40);
    CHECK(std::set<std::byte*>(pages.begin(), pages.end()).size() == pages.size());
    CHECK(pool.mapped_bytes() < pool.budget_bytes() + 20 * kSlabBytes);
    std::mt19937 random(3);
    twice.resize(pages.size());
    for (std::size_t i = 0; i < pages.size(); ++i) {
        const unsigned kind = random() % 20;
        if (kind > 1) {
            pool.release(std::exchange(pages[i], nullptr));
        } else if (kind == 1) {
            pool.share(twice[i] = pages[i]);
        }
    }
    const std::size_t resident = resident_bytes();
    pool.set_budget(pool.used_pages());
    pool.compact([&](auto relocate) {
        for (std::vector<std::byte*>* owners : {&pages, &twice})
            for (std::byte*& page : *owners)
                if (page != nullptr) page = relocate(page);
    });
    CHECK(pool.mapped_bytes() < pool.used_bytes() + kSlabBytes);
    if (resident > 0) CHECK(resident - resident_bytes() > std::size_t{80} << 20);
    bool held = true;
    for (int i = 0; i < kPages; ++i) {
        const std::byte* page = pages[index(i)];
        if (page != nullptr) held = held && is_filled(page, i, kPage);
        if (twice[index(i)] != nullptr)
            held = held && twice[index(i)] == page && pool.is_shared(page);
    }
    CHECK(held);
}

// The following test counts the heap of cold storage.

// Holds what is allocated and mapped, beside the reported figures.
struct Memory {
    explicit Memory(const Sequence& sequence) {
        const StoreComponents& components = sequence.store.components();
        const FrozenFigures frozen = sequence.store.frozen();
        taken = static_cast<double>(machine.heap + components.storage->memory_bytes());
        counted =
            static_cast<double>(frozen.bytes() + frozen.sketch_bytes() + frozen.overhead_bytes() +
                                components.scratch_bytes() + sequence.attention.scratch_bytes());
        overhead = static_cast<double>(machine.heap - frozen.sketch_bytes());
        n_frozen = static_cast<double>(frozen.now());
    }
    double taken, counted, overhead, n_frozen;
};

// All additional memory of a longer text is counted, and little of it is neither entries nor
// sketches. (An entry has a record of 12 bytes, or 24 with a timer, and the scratch of one thread
// takes 10 bytes per record of a head.)
void test_the_heap_of_frozen_entries_is_counted(bool scheduled) {
    StoreSettings settings = settings_of(KvType::q8_0, ScoreKind::mass);
    settings.freezing = FreezeSettings{};
    if (scheduled) settings.freezing->schedule = FreezeSchedule{8, 0.01f, 4.0f, 0};
    settings.max_entries = 1 << 20;
    std::mt19937 random(4);
    std::vector<double> numbers;
    const auto sequence = make_sequence(settings, nullptr);
    sequence->set_budget(64);
    const auto read_until = [&](int end) {
        while (sequence->end < end) {
            numbers.clear();
            sequence->read(256, random, numbers);
        }
        std::vector<double>().swap(numbers);
    };
    read_until(4096);
    const Memory before(*sequence);
    for (const int end : {5000, 9000, 16384, 33000}) {
        read_until(end);
        const Memory now(*sequence);
        const double n = now.n_frozen - before.n_frozen;
        CHECK(n > 1000.0);
        CHECK(now.taken - before.taken <= now.counted - before.counted + 0.5 * n);
        if (end > 6000) CHECK(now.overhead - before.overhead < (scheduled ? 40.0 : 27.0) * n);
    }
}

}  // namespace

int main() {
    test_full_machines();
    test_a_large_pool_is_mapped_at_once();
    test_a_pool_that_grows_in_small_steps();
    for (const bool scheduled : {false, true})
        test_the_heap_of_frozen_entries_is_counted(scheduled);
    return summary();
}
