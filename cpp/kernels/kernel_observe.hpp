// Part of kernels.cpp: what queries give to single entries.
#pragma once

#include "kernels/kernel_prompt.hpp"

namespace entropykv {
namespace {

// What a row's query gives to an entry; shift and factor are of the row: see row_factor().
template <Statistic What>
inline Vec observed(Vec logit, Vec shift, Vec factor) {
    const Vec floor = broadcast(0.5f * kMaskedLogit);
    Vec given;
    if constexpr (What == Statistic::product) {
        given = maximum(logit, zero() - logit);
    } else {
        given = exponential(logit - shift);
    }
    return where_less(logit, floor, zero(), given) * factor;
}

template <Statistic What>
inline Vec add_observed(Vec given, Vec sums) {
    if constexpr (What == Statistic::squared_probability) {
        return multiply_add(given, given, sums);
    } else if constexpr (What == Statistic::largest_probability) {
        return maximum(given, sums);
    } else {
        return sums + given;
    }
}

// What the lanes of `given` and `sum` are together.
template <Statistic What>
inline float merged(float sum_so_far, Vec given) {
    if constexpr (What == Statistic::largest_probability) {
        const float most = largest(given);
        return most > sum_so_far ? most : sum_so_far;
    } else {
        return sum_so_far + sum(given);
    }
}

template <Statistic What>
inline float row_factor(float weight, float softmax_sum) {
    if constexpr (What == Statistic::product) return weight;
    if constexpr (What == Statistic::probability || What == Statistic::largest_probability)
        return weight / softmax_sum;
    return __builtin_sqrtf(weight) / softmax_sum;  // what it gives is squared with it
}

template <KvType Type, Statistic What>
void prompt_observe_typed(const PromptTask& task, const float* row_weights, float neighbourhood,
                          float* sums) {
    const PageLayout& layout = *task.entries.layout;
    const PromptScratch scratch = split_scratch(task);
    // Rows beyond task.rows only fill the last vector: they must not count.
    for (int row = 0; row < kRowTile; ++row) {
        const bool counts = row < task.rows && row_weights[row] > 0.0f;
        scratch.factors[row] =
            counts ? row_factor<What>(row_weights[row], task.state.sum[row]) : 0.0f;
        scratch.shifts[row] = counts ? task.state.max[row] : -kMaskedLogit;
    }
    PromptTile tile;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        open_tile(task.entries, first, kEntryTile, tile);
        const int count = tile.count - tile.skipped;
        tile_scores(task, convert_k<Type>(tile, layout, scratch.k), count, scratch.logits);
        finish_scores(task, tile, count, scratch.logits);
        for (int e = 0; e < count; ++e) {
            const Vec reach = broadcast(position_of(task, tile, e) + neighbourhood - 0.5f);
            Vec total = zero();
            for (int row = 0; row < task.rows; row += kLanes) {
                const Vec given =
                    observed<What>(load(scratch.logits + e * kRowTile + row),
                                   load(scratch.shifts + row), load(scratch.factors + row));
                total = add_observed<What>(
                    where_less(load(task.row_positions + row), reach, zero(), given), total);
            }
            float& of_entry = sums[first - task.entries.first + e];
            of_entry = merged<What>(of_entry, total);
        }
    }
}

template <Statistic What>
void prompt_observe_what(const PromptTask& task, const float* row_weights, float neighbourhood,
                         float* sums) {
    if (task.entries.layout->type == KvType::f16) {
        prompt_observe_typed<KvType::f16, What>(task, row_weights, neighbourhood, sums);
    } else {
        prompt_observe_typed<KvType::q8_0, What>(task, row_weights, neighbourhood, sums);
    }
}

template <Statistic What>
void logits_observe_what(const float* logits, int n, float max, float softmax_sum, float* sums) {
    const Vec shift = broadcast(max);
    const Vec factor = broadcast(row_factor<What>(1.0f, softmax_sum));
    int j = 0;
    for (; j + kLanes <= n; j += kLanes) {
        const Vec given = observed<What>(load(logits + j), shift, factor);
        store(sums + j, add_observed<What>(given, load(sums + j)));
    }
    if (j == n) return;
    float rest[kLanes];
    for (int i = 0; i < kLanes; ++i) rest[i] = j + i < n ? logits[j + i] : kMaskedLogit;
    store(rest, add_observed<What>(observed<What>(load(rest), shift, factor), zero()));
    for (int i = 0; j + i < n; ++i) {
        if constexpr (What == Statistic::largest_probability) {
            sums[j + i] = rest[i] > sums[j + i] ? rest[i] : sums[j + i];
        } else {
            sums[j + i] += rest[i];
        }
    }
}

// A statistic as a type, so that kernels are compiled for it.
template <Statistic What>
struct Known {
    static constexpr Statistic what = What;
};

template <typename Observe>
inline void with_statistic(Statistic what, Observe observe) {
    switch (what) {
        case Statistic::squared_probability:
            return observe(Known<Statistic::squared_probability>{});
        case Statistic::probability: return observe(Known<Statistic::probability>{});
        case Statistic::product: return observe(Known<Statistic::product>{});
        case Statistic::largest_probability:
            return observe(Known<Statistic::largest_probability>{});
    }
}

void prompt_observe(const PromptTask& task, Statistic what, const float* row_weights,
                    float neighbourhood, float* sums) {
    with_statistic(what, [&](auto known) {
        prompt_observe_what<decltype(known)::what>(task, row_weights, neighbourhood, sums);
    });
}

void logits_observe(const float* logits, int n, Statistic what, float max, float softmax_sum,
                    float* sums) {
    with_statistic(what, [&](auto known) {
        logits_observe_what<decltype(known)::what>(logits, n, max, softmax_sum, sums);
    });
}

}  // namespace
}  // namespace entropykv
