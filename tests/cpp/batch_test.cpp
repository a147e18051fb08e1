// Several sequences in one pool of pages are read together. Each computes and keeps what it does
// alone, and together they never hold more pages than the pool has.
#include "attention/attention.hpp"

#include <array>

#include "pair.hpp"

namespace {

constexpr int kSequences = 5;
constexpr int kLayers = 3;
constexpr int kPiece = 40;

struct Machine {
    Machine(const LayerShape& shape, const StoreSettings& settings, int n_threads, unsigned seed)
        : shape(shape),
          layers(kLayers, shape),
          n_threads(n_threads),
          random(seed),
          pool(std::make_shared<StorePool>(layers, settings.type, kPiece, kSequences)) {
        const auto workers = std::make_shared<Workers>();
        for (int i = 0; i < kSequences; ++i)
            pairs.push_back(std::make_unique<Pair>(layers, settings, pool, n_threads, workers));
        resize(below(400) + 200);
    }

    int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }

    // Sets another budget of the pool, and equal shares of it. The pool grows before the shares,
    // and shrinks after them.
    void resize(int pages) {
        const std::size_t before = pool->pages().budget_bytes() / pool->pages().page_bytes();
        if (index(pages) > before) pool->set_pages(index(pages));
        const int share = pages / kSequences;
        const auto apply = [&](Pair& pair, HeadStore& store) {
            const int per_head = share / (kLayers * shape.n_head_kv);
            const int entries = std::min(kMaxEntries, per_head * pair.alone.layout(0).entries);
            const std::vector<int> budgets(index(kLayers * shape.n_head_kv), std::max(entries, 12));
            store.set_budgets(budgets, index(share), kProtection);
        };
        for (const std::unique_ptr<Pair>& pair : pairs) {
            apply(*pair, pair->shared);
            apply(*pair, pair->alone);
        }
        pool->set_pages(index(pages));
        CHECK(pool->shared_pages() <= index(pages));
    }

    LayerRows rows(int n) {
        return {random_rows(random, n * shape.n_head * shape.k_dim),
                random_rows(random, n * shape.n_head_kv * shape.k_dim),
                random_rows(random, n * shape.n_head_kv * shape.v_dim)};
    }

    // Reads a single token of some sequences, and a chunk of one.
    void step() {
        std::vector<std::pair<Pair*, int>> parts;
        const int reader = below(2) == 0 ? below(kSequences) : -1;
        for (int i = 0; i < kSequences; ++i)
            if (i != reader && below(3) > 0) parts.emplace_back(pairs[index(i)].get(), 1);
        if (reader >= 0) parts.emplace_back(pairs[index(reader)].get(), 2 + below(kPiece - 1));
        for (auto& [pair, n] : parts)
            if (pair->end + n > kMaxEntries) pair->truncate(0);
        if (parts.empty()) return;
        batch.clear();
        for (auto& [pair, n] : parts) {
            batch.add(pair->attention, {n, pair->end, pair->end});
            pair->attention_alone.begin({n, pair->end, pair->end});
        }
        for (int layer = 0; layer < kLayers; ++layer) read(parts, layer);
        for (auto& [pair, n] : parts) pair->end += n;
        CHECK(pool->pages().used_bytes() <= pool->pages().budget_bytes());
    }

    // Reads runs of several sequences, of whose drafts some are wrong; alone, each sequence reads
    // the right tokens one by one.
    void step_with_drafts() {
        struct Run {
            Pair* pair;
            int n, n_right;
            std::vector<LayerRows> layers;
        };
        std::vector<Run> runs;
        int room = static_cast<int>(pool->staging().row_pages());
        for (const std::unique_ptr<Pair>& pair : pairs) {
            if (pair->end + 20 > kMaxEntries) pair->truncate(0);
            const int n_drafts = pair->attention.most_drafts(std::min(room - 1, below(6)));
            if (n_drafts < 1 || room < 2) continue;
            room -= n_drafts + 1;
            runs.push_back({pair.get(), n_drafts + 1, 1 + below(n_drafts + 1), {}});
        }
        if (runs.empty()) return;
        batch.clear();
        for (Run& run : runs) {
            const std::int32_t end = run.pair->end;
            batch.add(run.pair->attention, {run.n, end, end, 0, run.n - 1});
            for (int layer = 0; layer < kLayers; ++layer) run.layers.push_back(rows(run.n));
        }
        std::vector<std::vector<float>> outputs;
        for (int layer = 0; layer < kLayers; ++layer) {
            LayerRows all;
            for (const Run& run : runs)
                for (const auto member : {&LayerRows::q, &LayerRows::k, &LayerRows::v})
                    append(all.*member, run.layers[index(layer)].*member);
            outputs.push_back(attend_together(all, layer));
        }
        for (const Run& run : runs) run.pair->attention.settle_drafts(run.n_right - 1);
        std::size_t before = 0;
        for (const Run& run : runs) {
            for (int token = 0; token < run.n_right; ++token) {
                Pair& pair = *run.pair;
                pair.attention_alone.begin({1, pair.end, pair.end});
                for (int layer = 0; layer < kLayers; ++layer) {
                    const std::vector<float> expected = read_alone(
                        pair.attention_alone, one_of(run.layers[index(layer)], token), 1, layer);
                    const float* found =
                        outputs[index(layer)].data() + before + index(token) * expected.size();
                    CHECK(std::equal(expected.begin(), expected.end(), found));
                }
                ++pair.end;
            }
            before += index(run.n * shape.n_head * shape.v_dim);
        }
        CHECK(pool->pages().used_bytes() <= pool->pages().budget_bytes());
    }

    static void append(std::vector<float>& to, const std::vector<float>& more) {
        to.insert(to.end(), more.begin(), more.end());
    }

    // Returns the rows of one token.
    LayerRows one_of(const LayerRows& run, int token) const {
        const auto slice = [&](const std::vector<float>& rows, int n) {
            const auto first = rows.begin() + token * n;
            return std::vector<float>(first, first + n);
        };
        return {slice(run.q, shape.n_head * shape.k_dim),
                slice(run.k, shape.n_head_kv * shape.k_dim),
                slice(run.v, shape.n_head_kv * shape.v_dim)};
    }

    std::vector<float> attend_together(const LayerRows& all, int layer) {
        AttentionParams params;
        params.scale = 0.2f;
        std::vector<float> output(index(batch.n_tokens() * shape.n_head * shape.v_dim), NAN);
        const RowsView k = view(all.k, shape.n_head_kv, shape.k_dim);
        const RowsView v = view(all.v, shape.n_head_kv, shape.v_dim);
        const RowsView q = view(all.q, shape.n_head, shape.k_dim);
        run_node(n_threads, [&](int t) { batch.stage_k(layer, k, t, n_threads); });
        run_node(n_threads, [&](int t) { batch.stage_v(layer, v, t, n_threads); });
        for (int reader = 0; reader < shape.readers; ++reader) {
            run_node(n_threads,
                     [&](int t) { batch.attend(layer, reader, params, q, output.data(), t); });
        }
        return output;
    }

    void read(const std::vector<std::pair<Pair*, int>>& parts, int layer) {
        LayerRows all;
        std::vector<LayerRows> each;
        for (const auto& [pair, n] : parts) {
            each.push_back(rows(n));
            for (const auto member : {&LayerRows::q, &LayerRows::k, &LayerRows::v})
                append(all.*member, each.back().*member);
        }
        const std::vector<float> output = attend_together(all, layer);
        const float* found = output.data();
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const std::vector<float> expected =
                read_alone(parts[i].first->attention_alone, each[i], parts[i].second, layer);
            CHECK(std::equal(expected.begin(), expected.end(), found));
            found += expected.size();
        }
    }

    std::vector<float> read_alone(Attention& attention, const LayerRows& own, int n, int layer) {
        AttentionParams params;
        params.scale = 0.2f;
        std::vector<float> output(index(n * shape.n_head * shape.v_dim), NAN);
        attention.stage_k(layer, view(own.k, shape.n_head_kv, shape.k_dim), 0, 1);
        attention.stage_v(layer, view(own.v, shape.n_head_kv, shape.v_dim), 0, 1);
        for (int reader = 0; reader < shape.readers; ++reader) {
            attention.attend(layer, reader, params, view(own.q, shape.n_head, shape.k_dim),
                             output.data(), 0);
            attention.commit_due(0);
        }
        return output;
    }

    void compare() {
        std::size_t used = 0;
        for (const std::unique_ptr<Pair>& pair : pairs) {
            used += pair->shared.share().used_bytes();
            CHECK(pair->shared.share().used_bytes() <= pair->shared.share().budget_bytes());
            pair->compare();
        }
        CHECK(used == pool->pages().used_bytes());
    }

    LayerShape shape;
    std::vector<LayerShape> layers;
    int n_threads;
    std::mt19937 random;
    std::shared_ptr<StorePool> pool;
    std::vector<std::unique_ptr<Pair>> pairs;
    AttentionBatch batch;
};

void test_random_company(KvType type, ScoreKind score, unsigned seed) {
    LayerShape shape{6, 2, 24, 40, seed % 3 == 2 ? 60 : 0};
    shape.readers = 1 + static_cast<int>(seed % 4 == 3);
    StoreSettings settings = settings_of(type, score);
    settings.ropes.assign(kLayers, settings.ropes.front());
    if (seed % 3 == 1) settings.freezing = freezings()[seed % 2 + 1];
    Machine machine(shape, settings, 1 + static_cast<int>(seed % 3), seed);
    for (int step = 0; step < 90; ++step) {
        const int kind = machine.below(12);
        Pair& pair = *machine.pairs[index(machine.below(kSequences))];
        if (kind == 0) {
            machine.resize(machine.below(400) + 200);
        } else if (kind == 1) {
            pair.truncate(machine.below(pair.end + 1));
        } else if (kind < 6) {
            machine.step_with_drafts();
        } else {
            machine.step();
        }
        machine.compare();
    }
}

void test_what_is_impossible_is_refused() {
    const LayerShape shape{2, 1, 32, 32};
    const StoreSettings settings = settings_of(KvType::f16, ScoreKind::mass);
    const auto pool =
        std::make_shared<StorePool>(std::vector<LayerShape>{shape}, KvType::f16, 32, 2);
    HeadStore first({shape}, settings, pool), second({shape}, settings, pool);
    Attention one(first, *available_kernels().back(), 1);
    Attention two(second, *available_kernels().back(), 1);
    pool->set_pages(10);
    first.set_budgets({64}, 6, kProtection);
    CHECK(refused([&] { second.set_budgets({64}, 6, kProtection); }));
    second.set_budgets({64}, 4, kProtection);
    CHECK(refused([&] { pool->set_pages(9); }));
    AttentionBatch batch;
    batch.add(one, {32, 0, 0});
    // The sequence is in the micro-batch already.
    CHECK(refused([&] { batch.add(one, {1, 32, 32}); }));
    CHECK(refused([&] { batch.add(two, {1, 0, 0}); }));   // single tokens must come first
    CHECK(refused([&] { batch.add(two, {32, 0, 0}); }));  // there is no room
    CHECK(batch.n_tokens() == 32);
    batch.clear();
    batch.add(two, {1, 0, 0});
    batch.add(one, {32, 0, 0});
    CHECK(refused([&] { first.give_up_share(); }));
    first.truncate(0);
    first.give_up_share();
    second.set_budgets({64}, 10, kProtection);
}

}  // namespace

int main() {
    test_what_is_impossible_is_refused();
    for (const ScoreKind score : {ScoreKind::mass, ScoreKind::streaming, ScoreKind::predicted})
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
            for (unsigned seed = 0; seed < 8; ++seed) test_random_company(type, score, seed);
    return summary();
}
