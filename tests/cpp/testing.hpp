// Helps all C++ tests: counts checks, makes random micro-batches, runs nodes on threads as ggml
// does.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.hpp"
#include "decide/budget.hpp"
#include "platform/worker_threads.hpp"
#include "store/checkpoint.hpp"
#include "store/frozen_heads.hpp"
#include "store/head_states.hpp"
#include "store/head_store.hpp"

using namespace entropykv;  // NOLINT: a test of all of it

inline int passed = 0;
inline int failed = 0;

inline void check(bool ok, const char* what, const char* file, int line) {
    ++(ok ? passed : failed);
    if (!ok) std::printf("%s:%d: %s\n", file, line, what);
}

#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)

inline bool refused(const std::function<void()>& action) {
    try {
        action();
    } catch (const std::logic_error&) {
        return true;
    }
    return false;
}

inline std::size_t index(int i) { return static_cast<std::size_t>(i); }

inline std::vector<float> random_rows(std::mt19937& random, int n) {
    std::vector<float> rows(index(n));
    std::normal_distribution<float> normal;
    for (float& value : rows) value = normal(random);
    return rows;
}

constexpr Protection kProtection{4, 8};
constexpr int kMaxTokens = 300, kMaxEntries = 2000;

constexpr ScoreKind kScores[] = {ScoreKind::streaming, ScoreKind::recency,  ScoreKind::mass,
                                 ScoreKind::attention, ScoreKind::products, ScoreKind::predicted};

// Sets linear functions of a store that predicts scores: the same for all stores of equal layers.
inline void set_predictor(HeadStore& store) {
    std::mt19937 random(97);
    for (std::size_t layer = 0; layer < store.components().layers.size(); ++layer) {
        const int n = store.shape(static_cast<int>(layer)).n_head_kv *
                      store.components().features_of(layer).n;
        std::vector<float> weights = random_rows(random, n);
        for (float& weight : weights) weight *= 0.3f;
        store.components().set_predictor(layer, weights);
    }
}

// Returns settings with every option that all types and measures allow.
inline StoreSettings settings_of(KvType type, ScoreKind score) {
    ImportanceSettings importance{score, 0.9f, 40};
    importance.by_values = true;
    RopeParams rope;
    rope.n_dims = 8;
    return {type, importance, kProtection, false, true, kMaxTokens, kMaxEntries, {rope}, {}};
}

// Returns no freezing, recall alone, and the schedule with recall and a limit that drops pages.
inline std::vector<std::optional<FreezeSettings>> freezings() {
    FreezeSettings by_recall, by_schedule;
    by_recall.recall_interval = 2;
    by_schedule.type = ColdType::q4_0;
    by_schedule.recall_interval = 3;
    by_schedule.schedule = FreezeSchedule{16, 1.0f, 1.0f, 40};
    by_schedule.limit_bytes = 60000;
    return {std::nullopt, by_recall, by_schedule};
}

inline RowsView view(const std::vector<float>& rows, int heads, int dim) {
    const std::size_t head = index(dim) * sizeof(float);
    return {reinterpret_cast<const std::byte*>(rows.data()), head * index(heads), head};
}

// Runs one node of the graph: every thread runs it, and none continues before all are done. The
// threads stay, as ggml's do: a system may take a millisecond to make one. All of them begin
// together, so that none does the work of the others before they run.
inline void run_node(int n_threads, const std::function<void(int)>& node) {
    if (n_threads == 1) return node(0);
    static std::map<int, WorkerThreads> teams;
    WorkerThreads& team = teams.try_emplace(n_threads, n_threads).first->second;
    std::atomic<int> waiting{n_threads};
    team.run(n_threads, [&](int thread, int) {
        --waiting;
        while (waiting > 0) std::this_thread::yield();
        node(thread);
    });
}

// Holds the rows of a micro-batch in one layer; q has those of every reader.
struct LayerRows {
    std::vector<float> q, k, v;
};

inline LayerRows random_layer_rows(const LayerShape& shape, int n, std::mt19937& random) {
    return {random_rows(random, shape.readers * n * shape.n_head * shape.k_dim),
            random_rows(random, n * shape.n_head_kv * shape.k_dim),
            random_rows(random, n * shape.n_head_kv * shape.v_dim)};
}

// Attends with n tokens in one layer, after Attention::begin(); returns the outputs,
// [reader][token][query head][value].
inline std::vector<float> attend_layer(Attention& attention, int layer, const LayerRows& rows,
                                       int n, const AttentionParams& params, int n_threads) {
    const LayerShape& shape = attention.store().shape(layer);
    const int n_outputs = n * shape.n_head * shape.v_dim;
    std::vector<float> output(index(shape.readers * n_outputs), NAN);
    const RowsView k = view(rows.k, shape.n_head_kv, shape.k_dim);
    const RowsView v = view(rows.v, shape.n_head_kv, shape.v_dim);
    run_node(n_threads, [&](int t) { attention.stage_k(layer, k, t, n_threads); });
    if (!shape.latent)
        run_node(n_threads, [&](int t) { attention.stage_v(layer, v, t, n_threads); });
    for (int reader = 0; reader < shape.readers; ++reader) {
        const RowsView q = view(rows.q, shape.n_head, shape.k_dim).from(reader * n);
        float* out = output.data() + reader * n_outputs;
        run_node(n_threads, [&](int t) {
            attention.attend(layer, reader, params, q, out, t);
            attention.commit_due(t);
        });
    }
    return output;
}

// Reads a random micro-batch in the first layer, the last n_echo tokens of which are an echo.
// Returns what attend_layer() returns.
inline std::vector<float> read_batch(Attention& attention, const LayerShape& shape, int n,
                                     std::int32_t position, std::mt19937& random, int n_threads,
                                     bool sinks = false, bool biased = false, int n_echo = 0) {
    const LayerRows rows = random_layer_rows(shape, n, random);
    const std::vector<float> sink_logits = random_rows(random, shape.n_head);
    const std::vector<float> slopes = alibi_slopes(shape.n_head, 8.0f);
    AttentionParams params;
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape.k_dim));
    params.sinks = sinks ? sink_logits.data() : nullptr;
    params.slopes = biased ? slopes.data() : nullptr;
    attention.begin({n - n_echo, position, position, n_echo});
    return attend_layer(attention, 0, rows, n, params, n_threads);
}

// Gives every KV head the same budget, and the store a share of pages that has just room for them.
inline void set_equal_budgets(HeadStore& store, int entries) {
    std::vector<int> budgets;
    int pages = 0;
    for (int layer = 0; layer < store.n_layers(); ++layer) {
        const int n_heads = store.shape(layer).n_head_kv;
        budgets.insert(budgets.end(), index(n_heads), entries);
        pages += n_heads * pages_for(entries, store.layout(layer).entries);
    }
    store.set_budgets(budgets, index(pages), store.settings().protection);
}

// Returns a head of the first layer as it is saved. fill: what the bytes are before.
inline std::vector<std::byte> state_of(const HeadStore& store, int head, std::byte fill = {}) {
    const HeadSaver saver(store.components());
    std::vector<std::byte> state(saver.bytes(0, head), fill);
    saver.save(0, head, state.data());
    return state;
}

// Returns what is wrong with a state of a head of the first layer, in a text that ends at `end`.
inline std::string problem_of(const HeadStore& store, int head, const std::vector<std::byte>& state,
                              std::int32_t end) {
    return HeadSaver(store.components())
        .problem(0, store.head(0, head).count(), state.data(), state.size(), end);
}

// Tells whether two heads hold the same positions, each with the same importance.
inline bool hold_the_same(const Head& a, const Head& b) {
    return positions_of(a) == positions_of(b) && importance_of(a) == importance_of(b);
}

// Appends values to a list of all numbers that a run gives.
template <typename Values>
void note(std::vector<double>& numbers, const Values& values) {
    for (const auto value : values) numbers.push_back(static_cast<double>(value));
}

// Prints "N passed, M failed"; returns the exit code.
inline int summary() {
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
