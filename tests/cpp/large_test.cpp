// Tests sizes beyond the usual ones: heads with more than 10,000 entries, micro-batches
// that recall thousands of them, 64 and more query heads per KV head, positions that floats cannot
// hold exactly, and queries that are not numbers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "testing.hpp"

namespace {

// The tests use a store of several layers, and micro-batches for it.

using Rows = std::vector<float>;

struct Model {
    Model(const std::vector<LayerShape>& layers, const StoreSettings& settings, int budget,
          int threads)
        : shapes(layers),
          n_threads(threads),
          store(layers, settings),
          attention(store, *available_kernels().back(), threads) {
        set_budget(budget);
    }

    void set_budget(int budget) { set_equal_budgets(store, budget); }

    // Reads a micro-batch, with other rows for every layer; returns the outputs.
    Rows read(const std::vector<LayerRows>& batches, int n, bool biased = false) {
        Rows outputs;
        attention.begin({n, end, end});
        for (int l = 0; l < store.n_layers(); ++l) {
            const LayerShape& shape = shapes[index(l)];
            const std::vector<float> slopes = alibi_slopes(shape.n_head, 8.0f);
            AttentionParams params;
            params.scale = 1.0f / std::sqrt(static_cast<float>(shape.k_dim));
            params.slopes = biased ? slopes.data() : nullptr;
            params.softcap = softcap;
            const Rows output = attend_layer(attention, l, batches[index(l)], n, params, n_threads);
            outputs.insert(outputs.end(), output.begin(), output.end());
        }
        end += n;
        return outputs;
    }

    Rows read(int n, std::mt19937& random, bool biased = false) {
        std::vector<LayerRows> batches;
        for (const LayerShape& shape : shapes)
            batches.push_back(random_layer_rows(shape, n, random));
        return read(batches, n, biased);
    }

    std::vector<LayerShape> shapes;
    int n_threads;
    HeadStore store;
    Attention attention;
    std::int32_t end = 0;
    float softcap = 0.0f;
};

StoreSettings plain_settings(int max_entries) {
    StoreSettings settings;
    settings.importance.observation_window = 8;
    settings.protection = {4, 64};
    settings.max_tokens = 512;
    settings.max_entries = max_entries;
    return settings;
}

bool all_finite(const Rows& values) {
    return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

// Checks budgets, sinks and the recent window, and that no position exists twice, held or frozen.
void check_model(const Model& model) {
    const Protection& protection = model.store.settings().protection;
    CHECK(model.store.share().used_bytes() <= model.store.share().budget_bytes());
    CHECK(model.store.frozen().failure() == nullptr);
    for (int l = 0; l < model.store.n_layers(); ++l) {
        for (int h = 0; h < model.store.shape(l).n_head_kv; ++h) {
            const std::vector<std::int32_t> hot = positions_of(model.store.head(l, h));
            const std::vector<std::int32_t> cold = frozen_positions(model.store.head(l, h));
            std::set<std::int32_t> all(hot.begin(), hot.end());
            all.insert(cold.begin(), cold.end());
            CHECK(all.size() == hot.size() + cold.size());
            CHECK(model.store.head(l, h).count() <= model.store.head(l, h).budget());
            CHECK(hot.back() == model.end - 1 && hot.front() >= 0);
            const auto recent = hot.end() - protection.recent_window;
            CHECK(*recent == model.end - protection.recent_window);
            for (int i = 0; i < protection.n_sinks; ++i) CHECK(hot[index(i)] == i);
            CHECK(all_finite(importance_of(model.store.head(l, h))));
        }
    }
}

// The following tests recall thousands of entries at once.

// Makes rows that mostly point to a topic, with some noise.
LayerRows on_topic(const LayerShape& shape, int n, int topic, std::mt19937& random) {
    LayerRows batch = random_layer_rows(shape, n, random);
    for (Rows* rows : {&batch.q, &batch.k}) {
        for (std::size_t i = 0; i < rows->size(); ++i) {
            const int d = static_cast<int>(i) % shape.k_dim;
            (*rows)[i] = 0.2f * (*rows)[i] + (d == topic ? 6.0f : 0.0f);
        }
    }
    return batch;
}

void read_topic(Model& model, int topic, int n, std::mt19937& random) {
    while (n > 0) {
        const int step = std::min(n, 512);
        model.read({on_topic(model.shapes[0], step, topic, random)}, step);
        n -= step;
    }
}

void test_thousands_come_back(const FreezeSettings& freezing, KvType type, int budget) {
    const LayerShape shape{1, 1, 16, 16};
    StoreSettings settings = plain_settings(1 << 20);
    settings.type = type;
    settings.freezing = freezing;
    if (freezing.schedule) settings.importance.kind = ScoreKind::attention;
    Model model({shape}, settings, budget, 2);
    std::mt19937 random(3);
    read_topic(model, 1, budget, random);
    read_topic(model, 2, budget + 500, random);
    check_model(model);
    CHECK(freezing.limit_bytes > 0 || model.store.frozen().now() > index(kMostRecalled) + 200);
    // Go back to the first topic one token at a time, then alternate.
    const std::size_t before = model.store.frozen().recalled();
    read_topic(model, 1, 1, random);
    const std::size_t recalled = model.store.frozen().recalled() - before;
    CHECK(recalled <= index(kMostRecalled));
    if (!freezing.schedule) CHECK(recalled > 1000);
    check_model(model);
    for (int step = 0; step < 4; ++step) {
        for (int i = 0; i < 3; ++i) read_topic(model, 1 + step % 2, 1, random);
        read_topic(model, 1 + step % 2, step * 20 + 1, random);
        check_model(model);
        if (freezing.limit_bytes > 0) CHECK(model.store.frozen().bytes() <= freezing.limit_bytes);
    }
    // A budget that shrinks to a tenth in one step freezes thousands of entries, and then grows
    // again.
    model.set_budget(budget / 10);
    check_model(model);
    read_topic(model, 1, 5, random);
    model.set_budget(2 * budget);
    read_topic(model, 2, 5, random);
    read_topic(model, 1, 600, random);
    check_model(model);
    FrozenHeads(model.store.components()).freeze_all(model.end - 1);
    CHECK(model.store.entries() == 0);
    FrozenHeads(model.store.components()).restore({-1, -1}, model.end - 1, false);
    if (freezing.limit_bytes == 0) {  // otherwise some entries were dropped
        CHECK(model.store.entries() > index(budget));
        check_model(model);
    }
    model.store.truncate(model.end -= 300);
    read_topic(model, 2, 100, random);
    check_model(model);
}

std::vector<FreezeSettings> large_freezings() {
    FreezeSettings by_recall, limited, by_schedule, both;
    limited.limit_bytes = 2500 * 64;  // fewer entries than are frozen
    limited.type = ColdType::q8_0;
    by_schedule.schedule = FreezeSchedule{64, 0.2f, 1.0f, 0};
    both.schedule = by_schedule.schedule;
    both.limit_bytes = limited.limit_bytes;
    return {by_recall, limited, by_schedule, both};
}

// The following two tests show that memory follows budgets and not contexts.

void test_scratch_follows_budgets() {
    const std::vector<LayerShape> layers{{2, 1, 16, 16}, {2, 2, 16, 16}};
    for (const auto& freezing : freezings()) {
        std::vector<std::size_t> bytes;
        for (const int max_entries : {4096, 1 << 20, 1 << 30}) {
            StoreSettings settings = plain_settings(max_entries);
            settings.freezing = freezing;
            if (settings.freezing) settings.freezing->limit_bytes = 0;
            if (settings.freezing && settings.freezing->schedule)
                settings.freezing->schedule->window = settings.protection.recent_window;
            Model model(layers, settings, 1000, 3);
            std::mt19937 random(4);
            for (const int n : {512, 512, 300, 1}) model.read(n, random);
            bytes.push_back(model.store.components().scratch_bytes() +
                            model.attention.scratch_bytes());
            check_model(model);
            // Memory is given back when budgets shrink, and grows with them again.
            model.set_budget(100);
            CHECK(model.store.components().scratch_bytes() < bytes.back());
            model.set_budget(max_entries > 4096 ? 10000 : 4096);
            for (int i = 0; i < 3; ++i) model.read(512, random);
            check_model(model);
        }
        CHECK(bytes[0] == bytes[1] && bytes[1] == bytes[2]);
    }
}

// What is observed of a prompt is kept per band of rows, so that 128 query heads per KV head need
// fewer than 100 floats for every entry. Each of the two threads also keeps weights of 64 rows.
void test_scratch_of_wide_groups() {
    constexpr int kEntries = 3000;
    StoreSettings settings = plain_settings(kEntries);
    settings.importance.observation_window = 512;
    Model model({{128, 1, 16, 16}}, settings, kEntries, 2);
    Model narrow({{1, 1, 16, 16}}, settings, kEntries, 2);
    std::mt19937 random(6);
    while (narrow.end + 512 < kEntries) narrow.read(512, random);
    std::vector<std::byte> state = state_of(narrow.store, 0);
    const int count = narrow.store.head(0, 0).count();
    HeadLoader(model.store.components()).begin({count}, {state.data()}, {kEntries});
    HeadLoader(model.store.components()).load(0, 0, count, state.data());
    model.end = narrow.end;
    model.read(256, random);
    check_model(model);
    CHECK(model.attention.scratch_bytes() < (100 + 2 * 80) * kEntries * sizeof(float));
}

// Layers with different groups give the same numbers with any number of threads.
void test_groups_side_by_side() {
    // With 128 query heads per KV head, a single token has two tiles. What waits to be committed of
    // one layer must not lie where the next layer observes.
    const std::vector<LayerShape> layers{{512, 4, 16, 16}, {4, 4, 16, 16},   {5, 5, 16, 16},
                                         {320, 5, 16, 16}, {640, 5, 16, 16}, {3, 1, 16, 16}};
    std::vector<double> alone;
    for (const int n_threads : {1, 2, 3, 4, 5, 7}) {
        StoreSettings settings = plain_settings(4096);
        settings.protection = {4, 8};
        settings.importance.decay = 0.9f;
        Model model(layers, settings, 60, n_threads);
        std::mt19937 random(8);
        std::vector<double> numbers;
        for (const int n : {70, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1})
            note(numbers, model.read(n, random));
        for (int l = 0; l < model.store.n_layers(); ++l) {
            for (int h = 0; h < model.store.shape(l).n_head_kv; ++h) {
                note(numbers, positions_of(model.store.head(l, h)));
                note(numbers, importance_of(model.store.head(l, h)));
            }
        }
        check_model(model);
        if (n_threads == 1) alone = numbers;
        check(numbers == alone, ("threads " + std::to_string(n_threads)).c_str(), __FILE__,
              __LINE__);
    }
}

// The following tests use positions that floats cannot tell apart.

struct Far {
    const char* name;
    LayerShape shape;
    ScoreKind score;
    bool biased;
    bool freezes;
    KvType type = KvType::f16;
    float softcap = 0.0f;
};

// Reads the same text from position `begin` on; returns outputs and what is kept, relative to
// `begin`.
std::vector<double> read_from(std::int32_t begin, const Far& test) {
    StoreSettings settings = plain_settings(kMostPositions);
    settings.importance.kind = test.score;
    settings.protection = {0, 20};
    if (test.freezes) settings.freezing = FreezeSettings{};
    settings.type = test.type;
    Model model({test.shape}, settings, 150, 2);
    model.end = begin;
    model.softcap = test.softcap;
    std::mt19937 random(11);
    std::vector<double> numbers;
    for (const int n : {100, 1, 1, 90, 3, 1, 1, 1, 1, 64, 1, 1, 20, 300, 1})
        note(numbers, model.read(n, random, test.biased));
    for (const std::int32_t position : positions_of(model.store.head(0, 0)))
        numbers.push_back(position - begin);
    for (const std::int32_t position : frozen_positions(model.store.head(0, 0)))
        numbers.push_back(position - begin);
    return numbers;
}

void test_far_positions() {
    const LayerShape plain{6, 2, 16, 16}, wide{64, 1, 16, 16};
    const LayerShape sliding{6, 2, 16, 16, 50}, chunked{6, 2, 16, 16, 64, true};
    LayerShape latent{12, 1, 96, 64};
    latent.latent = true;
    const LayerShape odd{6, 6, 17, 33}, single{3, 1, 1, 1};
    const Far tests[]{{"mass", plain, ScoreKind::mass, false, false},
                      {"wide", wide, ScoreKind::mass, false, false},
                      {"window", sliding, ScoreKind::mass, false, false},
                      {"chunks", chunked, ScoreKind::mass, false, false},
                      {"ALiBi", plain, ScoreKind::mass, true, false},
                      {"streaming", plain, ScoreKind::streaming, false, false},
                      {"recall", plain, ScoreKind::mass, true, true},
                      {"latent", latent, ScoreKind::mass, false, false, KvType::q8_0},
                      {"odd", odd, ScoreKind::attention, false, false, KvType::q8_0},
                      {"one value", single, ScoreKind::products, true, false},
                      {"softcap", wide, ScoreKind::products, false, true, KvType::q8_0, 5.0f}};
    for (const Far& test : tests) {
        // Chunks, and tokens that are scored, begin at the same places.
        const std::vector<double> near = read_from(1 << 12, test);
        for (const std::int32_t begin : {1 << 24, 1 << 26, 1 << 29, kMostPositions - (1 << 12)})
            check(read_from(begin, test) == near, test.name, __FILE__, __LINE__);
    }
    Model model({plain}, plain_settings(4096), 100, 1);
    std::mt19937 random(12);
    model.end = kMostPositions - 3;
    CHECK(refused([&] { model.read(4, random); }));
    model.end = -1;
    CHECK(refused([&] { model.read(1, random); }));
}

// The following tests use queries that are not numbers.

void test_bad_queries_leave_no_trace() {
    for (const ScoreKind score : kScores) {
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::infinity(), 1e30f}) {
            for (const int n_bad : {1, 40}) {
                StoreSettings settings = settings_of(KvType::f16, score);
                settings.freezing = freezings()[1];
                Model model({{4, 2, 16, 16}}, settings, 60, 2);
                model.attention.entropies().track(true);
                std::mt19937 random(13);
                for (const int n : {100, 1, 1}) model.read(n, random);
                LayerRows spoilt = random_layer_rows(model.shapes[0], n_bad, random);
                std::fill_n(spoilt.q.begin(), 4 * 16, bad);
                while (model.end % kScoringInterval != 0) model.read(1, random);
                model.read({spoilt}, n_bad);
                check_model(model);
                for (const int n : {1, 1, 1, 1, 1, 30, 1}) CHECK(all_finite(model.read(n, random)));
                check_model(model);
                for (const double sum : model.attention.entropies().sums(0))
                    CHECK(std::isfinite(sum));
                for (const int head : {0, 1})
                    CHECK(problem_of(model.store, head, state_of(model.store, head), model.end)
                              .empty());
            }
        }
    }
}

}  // namespace

int main() {
    for (const FreezeSettings& freezing : large_freezings())
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
            test_thousands_come_back(freezing, type, 3000);
    test_thousands_come_back({}, KvType::f16, 11'000);
    test_scratch_follows_budgets();
    test_scratch_of_wide_groups();
    test_groups_side_by_side();
    test_far_positions();
    test_bad_queries_leave_no_trace();
    return summary();
}
