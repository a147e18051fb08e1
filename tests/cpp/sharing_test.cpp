// Sequences share pages, with each other and with files. Each of them computes and keeps what it
// does with pages of its own. The pool counts every page once, never holds more than its budget,
// and frees pages without owners.
#include <cstring>
#include <map>

#include "pair.hpp"
#include "platform/file_access.hpp"
#include "temporary_file.hpp"

namespace {

constexpr int kHeads = 2;
constexpr int kMostSequences = 6;
constexpr int kLargestPiece = 40;

// Holds an earlier state of a sequence, as it was in the pool and alone.
struct Kept {
    std::unique_ptr<Checkpoint> checkpoint;
    std::vector<std::vector<std::byte>> states;
    std::vector<int> counts;
    std::size_t evicted;
    std::int32_t end;
};

struct Machine {
    Machine(const LayerShape& shape, const StoreSettings& settings, unsigned seed)
        : shape(shape),
          settings(settings),
          random(seed),
          pool(std::make_shared<StorePool>(std::vector<LayerShape>{shape}, settings.type,
                                           kLargestPiece, kMostSequences)) {
        pool->on_full([this] { return drop_one(); });
        resize(120 + below(200));
    }

    int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

    bool drop_one() {
        for (Kept& each : kept) {
            if (each.checkpoint->is_dropped() || &each == pinned) continue;
            each.checkpoint->drop();
            ++n_dropped;
            return true;
        }
        return false;
    }

    void resize(int pages) {
        const auto before = static_cast<int>(pool->pages().budget_pages());
        if (pages > before) pool->set_pages(index(pages));
        share = pages / kMostSequences;
        for (const auto& pair : pairs) set_budgets(*pair);
        pool->set_pages(index(pages));
    }

    void set_budgets(Pair& pair) {
        const int entries = std::max(share / kHeads * pair.alone.layout(0).entries, 13);
        const std::vector<int> budgets{std::min(entries, kMaxEntries),
                                       std::max(13, std::min(entries, kMaxEntries) - 9)};
        for (HeadStore* store : {&pair.shared, &pair.alone})
            store->set_budgets(budgets, index(share), kProtection);
    }

    Pair& add() {
        pairs.push_back(std::make_unique<Pair>(std::vector{shape}, settings, pool));
        set_budgets(*pairs.back());
        return *pairs.back();
    }

    void read(Pair& pair) {
        const int n = below(3) == 0 ? 1 + below(kLargestPiece) : 1;
        if (pair.end + n > kMaxEntries) pair.truncate(0);
        const unsigned seed = random();
        std::mt19937 first(seed), second(seed);
        const auto found = read_batch(pair.attention, shape, n, pair.end, first, 1);
        const auto expected = read_batch(pair.attention_alone, shape, n, pair.end, second, 1);
        CHECK(found == expected);
        pair.end += n;
    }

    void keep(Pair& pair) {
        Kept made{
            make_checkpoint(pair.shared.components()), {}, {}, pair.alone.evicted(), pair.end};
        CHECK(made.checkpoint->own_pages() == 0);
        for (int head = 0; head < kHeads; ++head) {
            made.counts.push_back(pair.alone.head(0, head).count());
            made.states.push_back(state_of(pair.alone, head));
            const StoreComponents& components = pair.shared.components();
            const CheckpointHead& saved = checkpoint_head(components, *made.checkpoint, 0, head);
            std::vector<std::byte> state(HeadSaver(components).bytes(0, saved));
            HeadSaver(components).save(0, saved, state.data());
            CHECK(state == made.states.back());
        }
        kept.push_back(std::move(made));
    }

    // Continues both copies of a sequence from a checkpoint.
    void go_on(Pair& pair, std::size_t number, bool ends) {
        Kept& from = kept[number];
        if (from.checkpoint->is_dropped()) {
            kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(number));
            return;
        }
        pinned = &from;
        const bool done = fork_from(pair.shared, *from.checkpoint, ends);
        pinned = nullptr;
        pair.alone.truncate(0);
        pair.end = done ? from.end : 0;
        if (!done) {
            ++n_refused;
            CHECK(pair.shared.entries() == 0);
            return;
        }
        ++n_forks;
        load(pair.alone, from.counts, from.states, from.evicted, nullptr);
        if (ends) kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(number));
    }

    // Returns the bytes of the whole pages that `bytes` bytes take.
    static std::size_t in_pages(const HeadStore& store, std::size_t bytes) {
        const std::size_t page = store.layout(0).bytes;
        return (bytes + page - 1) / page * page;
    }

    // Loads copies of states, which this changes; returns whether the entries stay in the file.
    static bool load(HeadStore& store, const std::vector<int>& counts,
                     std::vector<std::vector<std::byte>> states, std::size_t evicted,
                     const std::shared_ptr<MappedFile>& file) {
        std::vector<const std::byte*> starts;
        std::size_t offset = 0;
        for (const std::vector<std::byte>& state : states) {
            starts.push_back(file ? file->data() + offset : state.data());
            offset += in_pages(store, state.size());
        }
        HeadLoader loader(store.components());
        loader.begin(counts, starts, {store.head(0, 0).budget(), store.head(0, 1).budget()});
        store.components().common.evicted = evicted;
        if (file && loader.adopt(file, counts, starts)) return true;
        for (int head = 0; head < kHeads; ++head)
            loader.load(0, head, counts[index(head)], states[index(head)].data());
        return false;
    }

    // Both copies of a sequence continue from the states of a checkpoint, one from a mapped file.
    void load_from_file(Pair& pair, const Kept& from) {
        const auto counts = from.counts;
        const auto states = from.states;
        const std::size_t evicted = from.evicted;
        pair.end = from.end;
        auto file = std::make_unique<TemporaryFile>();
        std::vector<std::byte> all;
        for (const auto& state : states) {
            all.insert(all.end(), state.begin(), state.end());
            all.resize(in_pages(pair.shared, all.size()));
        }
        CHECK(write_at(file->number, all.data(), all.size(), 0));
        pair.shared.truncate(0);
        pair.alone.truncate(0);
        n_mapped += load(pair.shared, counts, states, evicted,
                         MappedFile::map(file->number, 0, all.size()));
        load(pair.alone, counts, states, evicted, nullptr);
        files.emplace_back(std::move(file), std::move(all));
        if (files.size() > 8) check_first_file();
    }

    void check_first_file() {
        std::vector<std::byte> now(files.front().second.size());
        CHECK(read_at(files.front().first->number, now.data(), now.size(), 0));
        CHECK(now == files.front().second);
        files.erase(files.begin());
    }

    void step() {
        const int kind = below(24);
        const std::size_t number = pairs.empty() ? 0 : random() % pairs.size();
        if (kind == 0 && pairs.size() > 1) {
            pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(number));
        } else if (kind <= 1 && pairs.size() < index(kMostSequences)) {
            add();
        } else if (pairs.empty()) {
            return;
        } else if (kind == 2) {
            pairs[number]->truncate(below(pairs[number]->end + 1));
        } else if (kind <= 4 && kept.size() < 24) {
            keep(*pairs[number]);
        } else if (kind <= 6 && !kept.empty()) {
            go_on(*pairs[number], random() % kept.size(), below(2) == 0);
        } else if (kind == 9 && !kept.empty()) {
            load_from_file(*pairs[number], kept[random() % kept.size()]);
        } else if (kind == 7 && kept.size() > 16) {
            kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(random() % kept.size()));
        } else if (kind == 8 && below(4) == 0) {
            resize(120 + below(200));
        } else {
            read(*pairs[number]);
        }
    }

    // Checks that every page is counted once, and has several owners if there are several
    // references to it.
    void count_pages() {
        std::map<const std::byte*, int> owners;
        std::size_t own = 0;
        for (const auto& pair : pairs) {
            for (int head = 0; head < kHeads; ++head) {
                const int per_page = pair->shared.layout(0).entries;
                const int n = (pair->shared.head(0, head).count() + per_page - 1) / per_page;
                for (int page = 0; page < n; ++page)
                    ++owners[pair->shared.head(0, head).pages[page]];
            }
            own += pair->shared.share().used_bytes();
            CHECK(pair->shared.share().used_bytes() <= pair->shared.share().budget_bytes());
        }
        std::size_t of_checkpoints = 0;
        for (const Kept& each : kept) of_checkpoints += each.checkpoint->pages();
        const PagePool& pages = pool->pages();
        CHECK(pages.used_bytes() <= pages.budget_bytes());
        CHECK(pages.used_pages() >= owners.size());
        CHECK(pages.used_bytes() <= own + of_checkpoints * pages.page_bytes());
        for (const auto& [page, n] : owners) CHECK(n == 1 || pages.is_shared(page));
        most_owners = std::max(most_owners, own / pages.page_bytes() - owners.size());
    }

    void compare() {
        for (const auto& pair : pairs) pair->compare();
    }

    LayerShape shape;
    StoreSettings settings;
    std::mt19937 random;
    std::shared_ptr<StorePool> pool;
    std::vector<std::unique_ptr<Pair>> pairs;
    std::vector<Kept> kept;
    const Kept* pinned = nullptr;
    int share = 0;
    int n_forks = 0, n_refused = 0, n_dropped = 0, n_mapped = 0;
    std::vector<std::pair<std::unique_ptr<TemporaryFile>, std::vector<std::byte>>> files;
    std::size_t most_owners = 0;
};

struct Totals {
    int steps = 0, forks = 0, dropped = 0, refused = 0, mapped = 0;
};

void test_random_sharing(KvType type, ScoreKind score, unsigned seed, int n_steps, Totals& totals) {
    const LayerShape shape{4, kHeads, 16, 16, seed % 3 == 2 ? 60 : 0};
    Machine machine(shape, settings_of(type, score), seed);
    for (int step = 0; step < n_steps; ++step, ++totals.steps) {
        machine.step();
        machine.count_pages();
        if (step % 8 == 0) machine.compare();
    }
    machine.compare();
    totals.forks += machine.n_forks;
    totals.dropped += machine.n_dropped;
    totals.refused += machine.n_refused;
    totals.mapped += machine.n_mapped;
    while (!machine.files.empty()) machine.check_first_file();
    CHECK(machine.most_owners > 0);
    machine.pairs.clear();
    machine.kept.clear();
    CHECK(machine.pool->pages().used_pages() == 0);
    CHECK(machine.pool->shared_pages() == 0);
}

// A fork takes no pages before it reads, and then one page per head.
void test_fork_costs_what_it_reads() {
    const LayerShape shape{4, kHeads, 16, 16};
    const StoreSettings settings = settings_of(KvType::f16, ScoreKind::mass);
    const auto pool = std::make_shared<StorePool>(std::vector<LayerShape>{shape}, KvType::f16,
                                                  kMaxTokens, kMostSequences);
    pool->set_pages(400);
    Pair first({shape}, settings, pool), second({shape}, settings, pool);
    const std::vector<int> budgets{1000, 1000};
    for (HeadStore* store : {&first.shared, &second.shared})
        store->set_budgets(budgets, 200, kProtection);
    std::mt19937 random(1);
    for (int end = 0; end < 600; end += 300)
        read_batch(first.attention, shape, 300, end, random, 1);
    const std::size_t alone = pool->pages().used_pages();
    CHECK(fork_from(second.shared, *make_checkpoint(first.shared.components()), false));
    CHECK(pool->pages().used_pages() == alone);
    CHECK(second.shared.share().used_bytes() == first.shared.share().used_bytes());
    read_batch(second.attention, shape, 1, 600, random, 1);
    CHECK(pool->pages().used_pages() == alone + kHeads);
    first.shared.truncate(0);  // the other sequence keeps what it has
    CHECK(second.shared.entries() == 601 * kHeads);
    CHECK(pool->pages().used_bytes() == second.shared.share().used_bytes());
    second.shared.set_budgets({40, 40}, 200, kProtection);
    CHECK(second.shared.entries() == 40 * kHeads);
    CHECK(pool->pages().used_bytes() == second.shared.share().used_bytes());
}

// If a checkpoint fills the pool, a store with a smaller share can only take it over.
void test_no_room_for_copies() {
    const LayerShape shape{4, kHeads, 16, 16};
    const StoreSettings settings = settings_of(KvType::f16, ScoreKind::mass);
    const auto pool = std::make_shared<StorePool>(std::vector<LayerShape>{shape}, KvType::f16,
                                                  kMaxTokens, kMostSequences);
    pool->set_pages(40);
    Pair pair({shape}, settings, pool);
    const int full = 20 * pair.shared.layout(0).entries;
    pair.shared.set_budgets({full, full}, 40, kProtection);
    std::mt19937 random(2);
    for (int end = 0; end + 100 < full; end += 100)
        read_batch(pair.attention, shape, 100, end, random, 1);
    read_batch(pair.attention, shape, 150, full / 100 * 100, random, 1);
    const auto checkpoint = make_checkpoint(pair.shared.components());
    const std::size_t used = pool->pages().used_pages();
    CHECK(used > 30);
    pair.shared.truncate(0);
    pair.shared.set_budgets({full / 2, full / 2}, 20, kProtection);
    CHECK(!fork_from(pair.shared, *checkpoint, false));
    CHECK(pair.shared.entries() == 0);
    CHECK(pool->pages().used_pages() == used && checkpoint->own_pages() == used);
    CHECK(fork_from(pair.shared, *checkpoint, true));
    CHECK(checkpoint->is_dropped());
    CHECK(pair.shared.entries() == index(full));
    CHECK(pool->pages().used_pages() == 20);
}

// A checkpoint that the pool may not drop holds its last page: what would have to copy pages is
// refused, and changes nothing.
void test_copies_that_find_no_page_are_refused() {
    const LayerShape shape{4, kHeads, 16, 16};
    const StoreSettings settings = settings_of(KvType::f16, ScoreKind::mass);
    const auto pool = std::make_shared<StorePool>(std::vector<LayerShape>{shape}, KvType::f16,
                                                  kMaxTokens, kMostSequences);
    pool->set_pages(kHeads);
    Pair pair({shape}, settings, pool);
    const int full = pair.shared.layout(0).entries;
    pair.shared.set_budgets({full, full}, kHeads, kProtection);
    std::mt19937 random(3);
    read_batch(pair.attention, shape, full - 1, 0, random, 1);
    const auto checkpoint = make_checkpoint(pair.shared.components());
    const std::vector<int> smaller(kHeads, 13);
    CHECK(refused([&] { pair.shared.set_budgets(smaller, kHeads, kProtection); }));
    CHECK(pair.shared.entries() == index(kHeads * (full - 1)));
    pair.shared.truncate(full - 2);  // moves no entry, so that it needs no copy
    checkpoint->drop();
    pair.shared.set_budgets(smaller, kHeads, kProtection);
    CHECK(pair.shared.entries() == index(kHeads * 13));
    const auto other = make_checkpoint(pair.shared.components());
    CHECK(refused([&] { pair.shared.truncate(full - 3); }));
    CHECK(pair.shared.entries() == index(kHeads * 13));
}

void test_what_is_impossible_is_refused() {
    const LayerShape shape{4, kHeads, 16, 16};
    StoreSettings settings = settings_of(KvType::f16, ScoreKind::mass);
    const auto pool = [&] {
        auto made =
            std::make_shared<StorePool>(std::vector<LayerShape>{shape}, KvType::f16, kMaxTokens, 2);
        made->set_pages(100);
        return made;
    };
    Pair one({shape}, settings, pool()), other({shape}, settings, pool());
    const auto checkpoint = make_checkpoint(one.shared.components());
    CHECK(refused([&] { fork_from(other.shared, *checkpoint, false); }));
    checkpoint->drop();
    CHECK(refused([&] { fork_from(one.shared, *checkpoint, false); }));
    settings.freezing = freezings()[1];
    HeadStore freezing({shape}, settings);
    CHECK(refused([&] { make_checkpoint(freezing.components()); }));
}

}  // namespace

int main() {
    test_fork_costs_what_it_reads();
    test_no_room_for_copies();
    test_copies_that_find_no_page_are_refused();
    test_what_is_impossible_is_refused();
    Totals totals;
    for (const ScoreKind score : {ScoreKind::mass, ScoreKind::streaming, ScoreKind::attention})
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
            for (unsigned seed = 0; seed < 6; ++seed)
                test_random_sharing(type, score, seed, 1400, totals);
    CHECK(totals.steps >= 50000);
    CHECK(totals.forks > 1000);
    CHECK(totals.dropped > 500);
    CHECK(kMapsFiles ? totals.mapped > 200 : totals.mapped == 0);
    std::printf("%d operations: %d forks, %d checkpoints dropped, %d refused, %d files mapped\n",
                totals.steps, totals.forks, totals.dropped, totals.refused, totals.mapped);
    return summary();
}
