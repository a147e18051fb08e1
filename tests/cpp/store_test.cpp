// Tests the core without Python: page pool, page layout, packed importance, and the store with
// attention on several threads as ggml runs it (with a barrier after every node of the graph).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "decide/budget.hpp"
#include "page/page_pool.hpp"
#include "store/rope.hpp"
#include "testing.hpp"

namespace {

void test_pool_never_exceeds_its_budget() {
    PagePool pool(1000, 5);
    std::set<std::byte*> pages;
    for (int i = 0; i < 5; ++i) pages.insert(pool.allocate());
    CHECK(pages.size() == 5 && pages.count(nullptr) == 0);
    CHECK(pool.allocate() == nullptr);
    CHECK(pool.used_bytes() == 5000 && pool.peak_bytes() == 5000 && pool.budget_bytes() == 5000);
    CHECK(refused([&] { pool.set_budget(4); }));
    pool.release(*pages.begin());
    pool.set_budget(4);
    CHECK(pool.allocate() == nullptr);
    CHECK(pool.used_bytes() == 4000 && pool.peak_bytes() == 5000);
    pool.set_budget(6);
    CHECK(pool.allocate() != nullptr && pool.allocate() != nullptr && pool.allocate() == nullptr);
}

// Compacts the pool; pages in use are those of the list that are not null.
void compact(PagePool& pool, std::vector<std::byte*>& pages) {
    pool.compact([&](auto relocate) {
        for (std::byte*& page : pages)
            if (page != nullptr) page = relocate(page);
    });
}

// Every page holds its number. What was in use survives compaction, and slabs are given back.
void test_pool_compacts() {
    constexpr std::size_t page_bytes = 256 * 1024;  // a slab holds 8 such pages
    PagePool pool(page_bytes, 40);
    std::vector<std::byte*> pages;
    for (int i = 0; i < 40; ++i) {
        pages.push_back(pool.allocate());
        std::memset(pages.back(), i, page_bytes);
    }
    compact(pool, pages);
    CHECK(pool.mapped_bytes() == 40 * page_bytes);  // every page is in use
    for (int i = 0; i < 40; ++i)
        if (i % 5 != 4) pool.release(std::exchange(pages[index(i)], nullptr));
    CHECK(pool.mapped_bytes() == 40 * page_bytes);
    compact(pool, pages);
    CHECK(pool.mapped_bytes() == 8 * page_bytes);
    CHECK(pool.used_bytes() == 8 * page_bytes);
    for (int i = 4; i < 40; i += 5) {
        const std::byte* page = pages[index(i)];
        CHECK(page[0] == std::byte(i) && std::memcmp(page, page + 1, page_bytes - 1) == 0);
    }
    std::byte stranger{};
    std::vector<std::byte*> foreign{&stranger};
    CHECK(refused([&] { compact(pool, foreign); }));
    std::vector<std::byte*> more = pages;
    while (std::byte* page = pool.allocate()) more.push_back(page);
    more.erase(std::remove(more.begin(), more.end(), nullptr), more.end());
    CHECK(std::set<std::byte*>(more.begin(), more.end()).size() == 40);
    CHECK(pool.used_bytes() == 40 * page_bytes && pool.mapped_bytes() == 40 * page_bytes);
}

// There are a quarter of a million pages in random places. If the cost of compaction were not
// proportional to them, this test would not end.
void test_pool_compacts_many_pages() {
    constexpr std::size_t page_bytes = 1024;
    constexpr int kPages = 1 << 18;
    PagePool pool(page_bytes, kPages);
    std::vector<std::byte*> pages;
    for (int i = 0; i < kPages; ++i) {
        pages.push_back(pool.allocate());
        std::memcpy(pages.back(), &i, sizeof i);
    }
    std::mt19937 random(9);
    for (std::byte*& page : pages)
        if (random() % 5 != 0) pool.release(std::exchange(page, nullptr));
    compact(pool, pages);
    CHECK(pool.mapped_bytes() < pool.used_bytes() + kSlabBytes);
    bool held = true;
    for (int i = 0; i < kPages; ++i) {
        const std::byte* page = pages[index(i)];
        held = held && (page == nullptr || std::memcmp(page, &i, sizeof i) == 0);
    }
    CHECK(held);
}

void test_layout_round_trip(KvType type, const KernelTable& kernels, int k_dim, int v_dim,
                            bool latent = false) {
    const PageLayout layout = make_page_layout(type, k_dim, v_dim, 17, latent);
    // Entries that are written to one page and copied to another, in reverse order, equal those
    // written there directly.
    std::vector<std::byte> from(layout.bytes), to(layout.bytes), direct(layout.bytes);
    std::mt19937 random(7);
    for (int slot = 0; slot < 17; ++slot) {
        const std::vector<float> row = random_rows(random, std::max(k_dim, v_dim));
        const auto write = [&](std::byte* page, int target) {
            kernels.store_k(layout, page, target, row.data());
            if (!latent) kernels.store_v(layout, page, target, row.data());
            layout.positions(page)[target] = 100 + slot;
            layout.importance(page)[target] = 0.5f * static_cast<float>(slot);
        };
        write(from.data(), slot);
        write(direct.data(), 16 - slot);
    }
    for (int slot = 0; slot < 17; ++slot)
        copy_entry(layout, from.data(), slot, to.data(), 16 - slot);
    CHECK(to == direct);
    CHECK(layout.positions(to.data())[0] == 116 && layout.importance(to.data())[0] == 8.0f);
    CHECK(layout.k_stride % 16 == 0 && layout.k_stride >= k_dim && layout.k_stride < k_dim + 16);
    CHECK(layout.importance_offset + 17 * sizeof(float) <= layout.bytes && layout.bytes % 64 == 0);
}

struct Case {
    const char* name;
    LayerShape shape;
    KvType type;
    ScoreKind score;
    int budget;  // Every KV head has this budget.
    std::vector<int> batches;
    bool sinks = false;
    std::optional<FreezeSettings> freezing{};
    bool biased = false;  // uses ALiBi
    float expected_lookups = 0.0f;
    bool echoes = false;  // the second half of every large micro-batch is an echo
};

// Returns a case in which a part of the scores is predicted.
Case expecting(Case test) {
    test.expected_lookups = 0.5f;
    return test;
}

// Returns a case whose large micro-batches have an echo.
Case echoing(Case test) {
    test.echoes = true;
    return test;
}

// Returns outputs, what is kept with its importance, and entropies: every number that a thread
// computes.
std::vector<double> run(const Case& test, const KernelTable& kernels, int n_threads) {
    StoreSettings settings = settings_of(test.type, test.score);
    settings.freezing = test.freezing;
    settings.importance.expected_lookups = test.expected_lookups;
    HeadStore store({test.shape}, settings);
    set_predictor(store);
    Attention attention(store, kernels, n_threads);
    attention.entropies().track(true);
    set_equal_budgets(store, test.budget);
    std::mt19937 random(42);
    std::vector<double> results;
    std::int32_t position = 0;
    for (const int n : test.batches) {
        const int n_echo = test.echoes && n > 32 ? n / 2 : 0;
        note(results, read_batch(attention, test.shape, n, position, random, n_threads, test.sinks,
                                 test.biased, n_echo));
        position += n - n_echo;
    }
    for (int h = 0; h < test.shape.n_head_kv; ++h) {
        note(results, positions_of(store.head(0, h)));
        note(results, importance_of(store.head(0, h)));
    }
    note(results, attention.entropies().sums(0));
    CHECK(attention.entropies().rows(0) == position * test.shape.readers);
    const int needed = test.shape.window > 0 ? test.shape.window : kMaxEntries;
    CHECK((store.evicted() + store.frozen().now() > 0) == (test.budget < needed));
    CHECK((store.frozen().recalled() > 0) == test.freezing.has_value());
    note(results, std::vector<std::size_t>{store.evicted(), store.frozen().now(),
                                           store.frozen().recalled()});
    return results;
}

void test_threads_agree(const Case& test, const KernelTable& kernels,
                        const std::vector<int>& numbers) {
    const std::vector<double> alone = run(test, kernels, 1);
    CHECK(std::none_of(alone.begin(), alone.end(), [](double x) { return !std::isfinite(x); }));
    for (const int n_threads : numbers)
        check(run(test, kernels, n_threads) == alone, test.name, __FILE__, __LINE__);
}

// The fastest kernels run with every type, on every number of threads. The code that divides work
// among threads is the same for all kernels, so the others run with one type, on one number.
void test_threads() {
    const std::vector<int> decode(60, 1);
    const std::vector<int> mixed{300, 1, 1, 5, 64, 1, 150, 2, 1, 65, 1, 1};
    const std::vector<int> large{300, 300, 300, 200, 1, 1};
    const LayerShape gqa{6, 2, 32, 32}, mqa{5, 1, 48, 32}, wide{16, 1, 32, 32}, many{9, 9, 16, 20};
    const LayerShape sliding{6, 2, 32, 32, 50}, chunked{6, 2, 32, 32, 50, true};
    LayerShape latent{16, 1, 80, 64}, shared{6, 2, 32, 32};
    latent.latent = true;
    shared.readers = 3;
    const ScoreKind mass = ScoreKind::mass;
    for (const KernelTable* kernels : available_kernels()) {
        const bool fastest = kernels == available_kernels().back();
        const std::vector<int> numbers = fastest ? std::vector{2, 3, 4, 7} : std::vector{3};
        for (const KvType type : {KvType::q8_0, KvType::f16, KvType::q8_0_iq4_nl}) {
            if (!fastest && type != KvType::q8_0) continue;
            const std::vector<Case> cases{
                {"decode", gqa, type, mass, 40, decode},
                {"decode, wide group", wide, type, mass, 40, decode},
                {"decode by recency", mqa, type, ScoreKind::recency, 40, decode},
                {"mixed", gqa, type, mass, 100, mixed},
                {"mixed by recency", gqa, type, ScoreKind::recency, 100, mixed},
                {"mixed, window and sinks", sliding, type, mass, 100, mixed, true},
                {"mixed, less than the window", sliding, type, mass, 40, mixed},
                {"mixed, chunks", chunked, type, mass, 100, mixed},
                {"mixed, biased", gqa, type, mass, 100, mixed, false, {}, true},
                {"decode, V in K", latent, type, mass, 40, decode},
                {"mixed, V in K", latent, type, mass, 100, mixed},
                {"mixed, V in K, recall", latent, type, mass, 60, mixed, false, freezings()[1]},
                {"mixed, three readers", shared, type, mass, 100, mixed},
                {"mixed, three readers, predicted", shared, type, ScoreKind::predicted, 100, mixed},
                {"mixed, three readers, schedule", shared, type, mass, 60, mixed, false,
                 freezings()[2]},
                {"mixed, MQA", mqa, type, mass, 150, mixed},
                {"mixed, many KV heads", many, type, mass, 60, mixed},
                {"mixed by attention", gqa, type, ScoreKind::attention, 100, mixed, true},
                {"mixed by products", gqa, type, ScoreKind::products, 100, mixed, true},
                {"mixed, predicted", gqa, type, ScoreKind::predicted, 100, mixed},
                {"mixed, V in K, predicted", latent, type, ScoreKind::predicted, 100, mixed},
                {"decode, predicted", mqa, type, ScoreKind::predicted, 40, decode},
                echoing({"mixed, predicted, echoes", gqa, type, ScoreKind::predicted, 100, mixed}),
                expecting({"decode, mass and predicted", mqa, type, mass, 40, decode}),
                echoing(expecting(
                    {"mixed, mass and predicted, echoes", gqa, type, mass, 100, mixed, true})),
                echoing(expecting({"mixed, three readers, attention and predicted, echoes", shared,
                                   type, ScoreKind::attention, 100, mixed})),
                {"large, nothing evicted", mqa, type, mass, kMaxEntries, large},
                {"mixed, recall", gqa, type, mass, 60, mixed, false, freezings()[1]},
                {"biased, recall", gqa, type, mass, 60, mixed, false, freezings()[1], true},
                {"mixed, schedule", many, type, mass, 60, mixed, false, freezings()[2]},
            };
            for (const Case& test : cases) test_threads_agree(test, *kernels, numbers);
        }
    }
}

// A store whose K and V lie elsewhere decides like one that holds them. Here they lie in rows of
// floats, which are written and moved as the store's entries say.
void test_keys_and_values_may_lie_elsewhere(const KernelTable& kernels) {
    constexpr int kHeads = 2, kBudget = 90;
    const LayerShape here{4, kHeads, 32, 32};
    LayerShape there{kHeads, kHeads, 1, 1};
    there.elsewhere = true;
    StoreSettings settings = settings_of(KvType::f16, ScoreKind::mass);
    HeadStore whole({here}, settings);
    settings.ropes.clear();
    HeadStore ledger({there}, settings);
    for (HeadStore* store : {&whole, &ledger}) {
        store->set_workers(1, kernels);
        set_equal_budgets(*store, kBudget);
    }
    const PageLayout& layout = whole.layout(0);
    const PageLayout& reference = ledger.layout(0);
    std::mt19937 random(21);
    std::uniform_real_distribution<float> given(0.0f, 1.0f);
    std::vector<float> norms(index(layout.entries));
    // [KV head][row][value]
    std::vector<std::vector<std::vector<float>>> elsewhere(kHeads);
    bool equal = true, follows = true;
    std::int32_t position = 0;
    for (const int n : {64, 1, 1, 300, 7, 1, 40, 1}) {
        for (HeadStore* store : {&whole, &ledger}) store->reserve(n, position + n - 1, false);
        for (int h = 0; h < kHeads; ++h) {
            for (int token = 0; token < n; ++token) {
                const std::vector<float> row = random_rows(random, layout.v_dim);
                std::byte* page = whole.staging(0, h)[layout.page_of(token)];
                const int slot = layout.slot_of(token);
                kernels.store_k(layout, page, slot, row.data());
                kernels.store_v(layout, page, slot, row.data());
                kernels.value_norms(layout, page, norms.data());
                std::byte* other = ledger.staging(0, h)[reference.page_of(token)];
                const int place = reference.slot_of(token);
                reference.row(other, place) = static_cast<int>(elsewhere[index(h)].size());
                reference.value_square(other, place) = norms[index(slot)];
                elsewhere[index(h)].push_back(row);
                layout.positions(page)[slot] = reference.positions(other)[place] = position + token;
                layout.importance(page)[slot] = reference.importance(other)[place] = 0.0f;
            }
            std::vector<float> observed(index(whole.head(0, h).count() + n));
            for (float& share : observed) share = given(random);
            for (HeadStore* store : {&whole, &ledger})
                store->commit(0, h, n, observed.data(), nullptr, 0.0f, 0);
            equal = equal && hold_the_same(whole.head(0, h), ledger.head(0, h));
            std::vector<float> value(index(layout.v_dim));
            for (int i = 0; i < ledger.head(0, h).count(); ++i) {
                const Slot slot = whole.head(0, h).place(i);
                load_v(layout, slot.page, slot.index, value.data());
                const Slot other = ledger.head(0, h).place(i);
                const int row = reference.row(other.page, other.index);
                const std::vector<float>& of_row = elsewhere[index(h)][index(row)];
                for (std::size_t d = 0; d < value.size(); ++d)
                    follows = follows && std::fabs(value[d] - of_row[d]) < 0.01f;
            }
        }
        position += n;
    }
    CHECK(equal);
    CHECK(follows);
    CHECK(whole.evicted() > 0 && whole.evicted() == ledger.evicted());
}

// Neighbouring shares that can be stored differ by at most this part.
constexpr float kShareStep = 1.0f / 128;

void test_packed_importance() {
    constexpr float kLeastShare = 1.0f / (1 << 20);
    constexpr float kLargest = std::numeric_limits<float>::max();
    constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
    const auto share_of = [](float share) { return PackedImportance(0.0f, share).share(); };
    const auto given_of = [](float given) { return PackedImportance(given, 0.0f).given(); };
    for (const float exact : {kLeastShare, 0.25f, 0.75f, 1.0f}) CHECK(share_of(exact) == exact);
    for (const float least : {0.0f, -1.0f, -INFINITY, NAN, kDenormal, kLeastShare / 2})
        CHECK(share_of(least) == kLeastShare);
    for (const float most : {1.0f, 1.5f, kLargest, INFINITY}) CHECK(share_of(most) == 1.0f);
    for (const float exact : {0.0f, 0.5f, 3.0f, 4096.0f}) CHECK(given_of(exact) == exact);
    for (const float nothing : {-1.0f, -INFINITY, NAN, -0.0f, kDenormal})
        CHECK(given_of(nothing) == 0.0f);
    // The importance stays finite, as loading a state requires.
    for (const float large : {kLargest, INFINITY}) {
        CHECK(std::isfinite(given_of(large)) && given_of(large) > 0.999f * kLargest);
        CHECK(std::isfinite(PackedImportance(large, 1.0f).packed()));
    }
    std::mt19937 random(3);
    std::uniform_real_distribution<float> octave(-20.0f, 0.0f), any(-100.0f, 100.0f);
    bool close = true, apart = true, ordered = true;
    float before = 0.0f;
    for (int i = 0; i < 5000; ++i) {
        const float share = std::exp2(octave(random)), given = std::exp2(any(random));
        const PackedImportance both(given, share);
        close = close && std::fabs(both.share() / share - 1.0f) <= kShareStep / 2 &&
                std::fabs(both.given() / given - 1.0f) <= 1.0f / 4096;
        const PackedImportance again(both.packed());
        apart = apart && both.packed() >= 0.0f && again.share() == both.share() &&
                again.given() == both.given() && both.with_given(7.0f).given() == 7.0f &&
                both.with_given(7.0f).share() == both.share() &&
                both.with_given(NAN).share() == both.share() &&
                both.with_larger_share(share / 2).packed() == both.packed() &&
                both.with_larger_share(NAN).packed() == both.packed() &&
                both.with_larger_share(1.0f).share() == 1.0f &&
                both.with_larger_share(1.0f).given() == both.given() &&
                PackedImportance(both.given(), both.share()).packed() == both.packed();
        const float next = static_cast<float>(i) / 4999.0f;
        ordered =
            ordered && share_of(next) >= share_of(before) && given_of(next) >= given_of(before);
        before = next;
    }
    CHECK(close);
    CHECK(apart);
    CHECK(ordered);
}

void test_scores_of_both_parts() {
    const float packed = PackedImportance(0.5f, 0.25f).packed();
    ImportanceSettings settings{ScoreKind::mass};
    CHECK(settings.score_of(0.3f) == 0.3f && settings.decayed(0.3f, 0.5f) == 0.15f);
    settings.expected_lookups = 2.0f;
    CHECK(settings.score_of(packed) == 0.5f + 2.0f * 0.0625f);
    CHECK(settings.score_of(settings.decayed(packed, 0.5f)) == 0.25f + 2.0f * 0.0625f);
    settings.kind = ScoreKind::attention;
    CHECK(settings.score_of(packed) == 0.5f + 2.0f * 0.25f);
    settings = ImportanceSettings{ScoreKind::predicted};
    CHECK(settings.score_of(packed) == 0.25f);
    CHECK(settings.score_of(settings.decayed(packed, 0.0f)) == 0.25f);
}

// A prediction turns a key back to position 0 from where RoPE has seen it, wherever the text is.
void test_prediction_follows_the_positions_of_rope() {
    constexpr int kTokens = 40;
    const LayerShape shape{2, 1, 32, 32};
    const StoreSettings settings = settings_of(KvType::f16, ScoreKind::predicted);
    std::mt19937 random(5);
    const std::vector<float> plain = random_rows(random, kTokens * shape.k_dim);
    const std::vector<float> v = random_rows(random, kTokens * shape.v_dim);
    std::vector<std::vector<float>> scores;
    for (const auto& [position, rope_position] :
         {std::pair{0, 0}, std::pair{0, 7}, std::pair{900, 7}, std::pair{900, 900}}) {
        HeadStore store({shape}, settings);
        set_predictor(store);
        Attention attention(store, *available_kernels().back(), 1);
        set_equal_budgets(store, kMaxTokens);
        InverseRope inverse_rope(settings.ropes.front());  // the opposite sign rotates forward
        std::vector<float> k = plain;
        inverse_rope.prepare(-rope_position - kTokens + 1, kTokens);
        for (int token = 0; token < kTokens; ++token)
            inverse_rope.rotate_back(kTokens - 1 - token, k.data() + token * shape.k_dim);
        attention.begin({kTokens, position, rope_position});
        attention.stage_k(0, view(k, 1, shape.k_dim), 0, 1);
        attention.stage_v(0, view(v, 1, shape.v_dim), 0, 1);
        std::vector<float> output(index(kTokens * 2 * shape.v_dim));
        const std::vector<float> q(index(kTokens * 2 * shape.k_dim));
        attention.attend(0, 0, {}, view(q, 2, shape.k_dim), output.data(), 0);
        attention.commit_due(0);
        scores.push_back(importance_of(store.head(0, 0)));
        for (float& score : scores.back()) score = settings.importance.score_of(score);
    }
    bool close = true;
    for (const std::vector<float>& others : scores)
        for (std::size_t i = 0; i < index(kTokens); ++i)
            close = close && std::fabs(others[i] / scores[0][i] - 1.0f) < kShareStep + 1e-3f;
    CHECK(close);
    const auto [least, most] = std::minmax_element(scores[0].begin(), scores[0].end());
    CHECK(*most > 10.0f * *least);
}

void check_store(const HeadStore& store, int n_heads, std::int32_t end, std::size_t most_bytes) {
    const bool windowed = store.shape(0).window > 0;
    CHECK(store.share().used_bytes() <= store.share().budget_bytes() &&
          store.share().peak_bytes() <= most_bytes);
    for (int h = 0; h < n_heads; ++h) {
        const std::vector<std::int32_t> positions = positions_of(store.head(0, h));
        const int n_sinks = std::min(end, kProtection.n_sinks);
        CHECK(store.head(0, h).count() <= store.head(0, h).budget());
        CHECK(std::set<int>(positions.begin(), positions.end()).size() == positions.size());
        // A rollback to before all that a window still holds leaves nothing.
        CHECK(positions.empty() ? end == 0 || windowed : positions.back() < end);
        CHECK(n_sinks == 0 || windowed || positions.at(index(n_sinks - 1)) == n_sinks - 1);
    }
}

// The address sanitizer checks this: micro-batches of every size, budgets up and down, truncation,
// re-basing.
void test_random_operations(KvType type, ScoreKind score, unsigned seed) {
    // In this test, stores that freeze have no windows.
    const bool windowed = seed % 3 == 0 && seed > 0;
    LayerShape shape{4, 2, 24, 40, windowed ? 20 * static_cast<int>(seed) : 0};
    shape.readers = 1 + static_cast<int>(seed % 2);
    shape.latent = seed % 4 == 1;
    if (shape.latent) shape.v_dim = 16;
    StoreSettings settings = settings_of(type, score);
    settings.freezing = freezings()[seed % 3];
    if (seed >= 4 && (score == ScoreKind::mass || score == ScoreKind::attention))
        settings.importance.expected_lookups = 0.5f;
    // Stores that freeze by a schedule take no echoes.
    const bool echoes = settings.importance.predicts() && seed % 3 != 2;
    HeadStore store({shape}, settings);
    set_predictor(store);
    const int n_threads = 3;
    Attention attention(store, *available_kernels().back(), n_threads);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    RopeParams rope;
    rope.n_dims = 16;
    rope.offset = 6;
    rope.neox = seed % 2 == 0;
    int shift = 0;
    std::int32_t end = 0;
    std::size_t most_bytes = 0;
    const auto set_budgets = [&] {
        const std::vector<int> budgets{12 + below(300), 12 + below(300)};
        const int per_page = store.layout(0).entries;
        const int pages = pages_for(budgets[0], per_page) + pages_for(budgets[1], per_page);
        store.set_budgets(budgets, index(pages + below(3)), kProtection);
        most_bytes = std::max(most_bytes, store.share().budget_bytes());
    };
    set_budgets();
    for (int step = 0; step < 60; ++step) {
        const int kind = below(11);
        if (kind == 0) {
            set_budgets();
        } else if (kind == 1) {
            end = static_cast<std::int32_t>(below(end + 1));
            store.truncate(end);
        } else if (kind == 10) {
            const int next = below(kMaxEntries);
            rebase(store, *available_kernels().back(), {rope}, kProtection.n_sinks, shift, next);
            shift = next;
        } else if (end < kMaxEntries - kMaxTokens) {
            const int n = kind < 6 ? 1 : 1 + below(kind < 9 ? 20 : kMaxTokens);
            const int n_echo = echoes && n > 1 ? below(n) : 0;
            read_batch(attention, shape, n, end, random, n_threads, false, false, n_echo);
            end += n - n_echo;
            const int n_recent = std::min(n - n_echo, kProtection.recent_window);
            for (const int head : {0, 1})
                CHECK(positions_of(store.head(0, head)).rbegin()[n_recent - 1] == end - n_recent);
        }
        check_store(store, 2, end, most_bytes);
        if (settings.freezing && settings.freezing->limit_bytes > 0)
            CHECK(store.frozen().bytes() <= settings.freezing->limit_bytes);
        CHECK(store.frozen().failure() == nullptr);
    }
    store.truncate(0);
    CHECK(store.entries() == 0 && store.share().used_bytes() == 0);
}

}  // namespace

int main() {
    test_pool_never_exceeds_its_budget();
    test_pool_compacts();
    test_pool_compacts_many_pages();
    for (const KernelTable* kernels : available_kernels())
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
            for (const int dim : {16, 20, 33, 64, 128}) {
                test_layout_round_trip(type, *kernels, dim, 144 - dim);
                test_layout_round_trip(type, *kernels, dim, dim - 7, true);
            }
    for (const KernelTable* kernels : available_kernels())
        test_keys_and_values_may_lie_elsewhere(*kernels);
    test_packed_importance();
    test_scores_of_both_parts();
    test_threads();
    test_prediction_follows_the_positions_of_rope();
    for (const ScoreKind score : kScores)
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
            for (unsigned seed = 0; seed < 8; ++seed) test_random_operations(type, score, seed);
    return summary();
}
