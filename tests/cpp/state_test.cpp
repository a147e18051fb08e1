// Tests the entries of heads as bytes: a loaded sequence continues like the saved one, bit for bit,
// and damaged states are refused.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "testing.hpp"

namespace {

constexpr int kThreads = 3;
const LayerShape kShape{4, 2, 24, 40};

using State = std::vector<std::byte>;

// Holds a store with its attention, budgets for both heads, and the end of its sequence.
struct Sequence {
    Sequence(KvType type, ScoreKind score, const std::vector<int>& budgets,
             const std::optional<FreezeSettings>& freezing = std::nullopt)
        : store({kShape}, with(freezing, settings_of(type, score))),
          attention(store, *available_kernels().back(), kThreads) {
        set_budgets(budgets);
    }

    static StoreSettings with(const std::optional<FreezeSettings>& freezing,
                              StoreSettings settings) {
        settings.freezing = freezing;
        return settings;
    }

    void set_budgets(const std::vector<int>& budgets) {
        const int per_page = store.layout(0).entries;
        store.set_budgets(budgets,
                          index(pages_for(budgets[0], per_page) + pages_for(budgets[1], per_page)),
                          kProtection);
    }

    std::vector<float> read(int n, std::mt19937& random) {
        std::vector<float> output = read_batch(attention, kShape, n, end, random, kThreads);
        end += n;
        return output;
    }

    std::vector<State> save() const {
        std::vector<State> states;
        for (const int head : {0, 1}) states.push_back(state_of(store, head, std::byte{0xAB}));

        return states;
    }

    void load(const Sequence& saved, std::vector<State> states) {
        HeadLoader(store.components())
            .begin({saved.store.head(0, 0).count(), saved.store.head(0, 1).count()},
                   {states[0].data(), states[1].data()},
                   {store.head(0, 0).budget(), store.head(0, 1).budget()});
        for (const int head : {0, 1})
            HeadLoader(store.components())
                .load(0, head, saved.store.head(0, head).count(), states[index(head)].data());
        end = saved.end;
    }

    HeadStore store;
    Attention attention;
    std::int32_t end = 0;
};

void check_same(const Sequence& a, const Sequence& b) {
    CHECK(a.save() == b.save());
    for (const int head : {0, 1}) {
        CHECK(hold_the_same(a.store.head(0, head), b.store.head(0, head)));
        CHECK(frozen_positions(a.store.head(0, head)) == frozen_positions(b.store.head(0, head)));
    }
    CHECK(b.store.share().used_bytes() <= b.store.share().budget_bytes());
}

// Checks that both hold the same, also after they have read the same micro-batches.
void check_same_future(Sequence& a, Sequence& b, unsigned seed) {
    check_same(a, b);
    for (const int n : {1, 1, 70, 1, 5, 1, 200, 1}) {
        std::mt19937 random_a(seed), random_b(seed);
        CHECK(a.read(n, random_a) == b.read(n, random_b));
    }
    check_same(a, b);
}

// Gives a sequence a past with evictions, truncation and a change of budget, so that slots are in
// no order.
Sequence& live(Sequence& sequence, unsigned seed) {
    std::mt19937 random(seed);
    for (int step = 0; step < 25; ++step) {
        const auto n = static_cast<int>(random() % 60);
        sequence.read(step % 3 == 0 ? 1 : 1 + n, random);
        if (step % 10 == 9) {
            sequence.end -= static_cast<std::int32_t>(random() % 20);
            sequence.store.truncate(sequence.end);
        }
    }
    return sequence;
}

void test_goes_on_as_saved(KvType type, ScoreKind score,
                           const std::optional<FreezeSettings>& freezing, unsigned seed) {
    Sequence saved(type, score, {60, 130}, freezing), loaded(type, score, {60, 130}, freezing);
    live(saved, seed);
    CHECK(freezing ? saved.store.frozen().now() > 0 : saved.store.evicted() > 0);
    live(loaded, seed + 100);  // what it held before must not matter
    loaded.load(saved, saved.save());
    check_same_future(saved, loaded, seed);
}

void test_larger_and_smaller_budgets(KvType type, ScoreKind score, unsigned seed) {
    Sequence saved(type, score, {60, 130}), larger(type, score, {300, 140});
    Sequence smaller(type, score, {40, 90});
    live(saved, seed);
    larger.load(saved, saved.save());
    check_same(saved, larger);
    smaller.load(saved, saved.save());
    saved.set_budgets({40, 90});
    CHECK(smaller.store.head(0, 0).count() == 40);
    check_same_future(saved, smaller, seed);
}

void test_an_empty_state() {
    Sequence empty(KvType::f16, ScoreKind::mass, {40, 40});
    Sequence loaded(KvType::f16, ScoreKind::mass, {40, 40});
    live(loaded, 5);
    loaded.load(empty, empty.save());
    CHECK(loaded.store.entries() == 0 && loaded.store.share().used_bytes() == 0);
    check_same_future(empty, loaded, 6);
}

void test_nothing_evicted_is_saved() {
    Sequence sequence(KvType::f16, ScoreKind::mass, {40, 40});
    live(sequence, 7);
    sequence.store.truncate(3);
    const PageLayout& layout = sequence.store.layout(0);
    const State state = sequence.save()[0];
    for (int slot = 3; slot < layout.entries; ++slot) {
        CHECK(layout.positions(state.data())[slot] == 0);
        const auto* v = reinterpret_cast<const std::uint16_t*>(state.data() + layout.v_at(slot));
        CHECK(std::all_of(v, v + layout.v_dim, [](std::uint16_t value) { return value == 0; }));
    }
}

void test_problems_are_named() {
    Sequence sequence(KvType::q8_0, ScoreKind::mass, {60, 130});
    live(sequence, 8);
    const HeadStore& store = sequence.store;
    const PageLayout& layout = store.layout(0);
    const int count = store.head(0, 0).count();
    State state = sequence.save()[0];
    const auto problem = [&](int n, std::size_t size, std::int32_t end) {
        return HeadSaver(store.components()).problem(0, n, state.data(), size, end);
    };
    CHECK(problem(count, state.size(), sequence.end).empty());
    CHECK(problem(count, state.size(), 0) == "a position that was never read");
    CHECK(problem(count, state.size(), -1) == "a position that was never read");
    CHECK(problem(-1, state.size(), sequence.end) == "an impossible number of entries");
    CHECK(problem(kMaxEntries + 1, state.size(), sequence.end) ==
          "an impossible number of entries");
    for (const std::size_t size : {std::size_t{0}, state.size() - 1, state.size() - layout.bytes})
        CHECK(problem(count, size, sequence.end) == "a size that is not that of its entries");
    std::byte* last = state.data() + (count - 1) / layout.entries * layout.bytes;
    const int slot = (count - 1) % layout.entries;
    float& importance = layout.importance(last)[slot];
    for (const float bad :
         {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        importance = bad;
        CHECK(problem(count, state.size(), sequence.end) == "an impossible importance");
    }
    importance = 0.0f;
    std::int32_t& position = layout.positions(last)[slot];
    for (const std::int32_t bad : {-1, sequence.end, std::numeric_limits<std::int32_t>::max()}) {
        position = bad;
        CHECK(problem(count, state.size(), sequence.end) == "a position that was never read");
    }
    position = layout.positions(state.data())[0];
    CHECK(problem(count, state.size(), sequence.end) == "a position twice");
}

// The sanitizers check this: damage that is not reported must be harmless.
void test_damage(KvType type, const std::optional<FreezeSettings>& freezing, unsigned seed) {
    std::mt19937 random(seed);
    Sequence saved(type, ScoreKind::mass, {60, 130}, freezing);
    live(saved, seed);
    int taken = 0;
    for (int round = 0; round < 40; ++round) {
        std::vector<State> states = saved.save();
        for (State& state : states)
            for (int i = 0; i < 1 + round / 8; ++i)
                state[random() % state.size()] = static_cast<std::byte>(random());
        bool fine = true;
        for (const int head : {0, 1})
            fine = fine && problem_of(saved.store, head, states[index(head)], saved.end).empty();
        if (!fine) continue;
        ++taken;
        Sequence loaded(type, ScoreKind::mass, {50, 100}, freezing);
        loaded.load(saved, states);
        for (const int n : {1, 40, 1}) loaded.read(n, random);
        loaded.store.truncate(loaded.end -= 45);
        for (const int n : {1, 40, 1}) loaded.read(n, random);
        CHECK(loaded.store.head(0, 0).count() <= 50 && loaded.store.head(0, 1).count() <= 100);
    }
    CHECK(taken > 0 && taken < 40);
}

}  // namespace

int main() {
    unsigned seed = 0;
    for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl}) {
        for (const ScoreKind score : kScores) {
            for (const auto& freezing : freezings())
                test_goes_on_as_saved(type, score, freezing, ++seed);
            test_larger_and_smaller_budgets(type, score, ++seed);
        }
        for (const auto& freezing : freezings()) test_damage(type, freezing, ++seed);
    }
    test_an_empty_state();
    test_nothing_evicted_is_saved();
    test_problems_are_named();
    return summary();
}
