// Part of kernels.cpp: computes what queries give to single entries.
#pragma once

#include "kernels/kernel_prompt.hpp"

namespace entropykv {
namespace {

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

// Combines the importance that earlier queries gave with what a vector of queries gives.
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
    return __builtin_sqrtf(weight) / softmax_sum;  // factors are squared together with the weight
}

// Returns what a vector of rows gives to an entry, from its scores (for products) or its weights in
// a tile. The factors turn weights into shares of the whole softmax, and products into logits.
template <Statistic What>
inline Vec given_by(Vec value, Vec factor) {
    if constexpr (What != Statistic::product) return value * factor;
    const Vec floor = broadcast(0.5f * kMaskedLogit);
    return where_less(value, floor, zero(), maximum(value, zero() - value)) * factor;
}

// Returns the factors of all rows for a tile; those of rows that do not count are 0.
template <Statistic What>
inline void observed_factors(const PromptTask& task, const PromptScratch& scratch,
                             const float* row_factors, const float* tile_max, float* factors) {
    for (int row = 0; row < task.rows; row += kLanes) {
        const Vec factor = load(row_factors + row);
        const Vec share = What == Statistic::product
                              ? unit_of(task, scratch, row)
                              : power_of_two(load(tile_max + row) - load(task.state.max + row));
        store(factors + row, where_less(zero(), factor, share * factor, zero()));
    }
}

// Returns the importance that all queries (rows) of a tile give to one of its entries.
template <Statistic What, bool Near>
inline Vec observed_entry(const PromptTask& task, const float* values, const float* factors,
                          Vec reach) {
    Vec total = zero();
    for (int row = 0; row < task.rows; row += kLanes) {
        Vec given = given_by<What>(load(values + row), load(factors + row));
        if constexpr (Near)
            given = where_less(load(task.row_positions + row), reach, zero(), given);
        total = add_observed<What>(given, total);
    }
    return total;
}

inline float earliest_row(const PromptTask& task) {
    float earliest = task.row_positions[0];
    for (int row = 1; row < task.rows; ++row) earliest = smaller(earliest, task.row_positions[row]);
    return earliest;
}

// Adds what the rows give to the entries of a tile, from the first one that is not skipped on, to
// the sums of these entries.
template <Statistic What>
inline void observe_tile(const PromptTask& task, const PromptTile& tile, const KeptTile& kept,
                         const float* factors, float neighbourhood, float* sums) {
    const float earliest = earliest_row(task);
    Vec given[kLanes];
    for (int first = tile.skipped; first < tile.count; first += kLanes) {
        const int n = smaller(kLanes, tile.count - first);
        for (int i = 0; i < kLanes; ++i) given[i] = zero();
        for (int i = 0; i < n; ++i) {
            const float reach = position_of(task, tile, first + i) + neighbourhood - 0.5f;
            const float* values = kept.rows + (first + i) * kRowTile;
            given[i] = reach > earliest
                           ? observed_entry<What, true>(task, values, factors, broadcast(reach))
                           : observed_entry<What, false>(task, values, factors, zero());
        }
        float* of_entries = sums + first - tile.skipped;
        if constexpr (What == Statistic::largest_probability) {
            for (int i = 0; i < n; ++i) of_entries[i] = merged<What>(of_entries[i], given[i]);
        } else {
            float totals[kLanes];
            store(totals, sums_of(given));
            for (int i = 0; i < n; ++i) of_entries[i] += totals[i];
        }
    }
}

template <KvType Type, Statistic What>
void prompt_observe_typed(const PromptTask& task, const float* row_weights, float neighbourhood,
                          float* sums) {
    const PromptScratch scratch = split_scratch(task);
    if (task.kept == nullptr) prepare_queries<Type>(task, scratch);
    // Rows beyond task.rows only fill the last vector, and rows whose sum is 0 contain values that
    // are not numbers. Neither may count.
    float row_factors[kRowTile];
    for (int row = 0; row < kRowTile; ++row) {
        const bool counts =
            row < task.rows && row_weights[row] > 0.0f && task.state.sum[row] > 0.0f;
        row_factors[row] = counts ? row_factor<What>(row_weights[row], task.state.sum[row]) : 0.0f;
    }
    PromptTile tile;
    float* next = task.kept;
    for (int first = task.entries.first; first < task.entries.last; first += kEntryTile) {
        open_tile(task.entries, first, kEntryTile, tile);
        const KeptTile kept = kept_at(next != nullptr ? next : scratch.kept, tile);
        if (next != nullptr) {
            next = kept.next;
        } else if (What == Statistic::product) {
            tile_scores<Type>(task, tile, scratch, kept.rows);
        } else {
            tile_weights<Type>(task, tile, scratch, kept);
        }
        observed_factors<What>(task, scratch, row_factors, kept.max, scratch.factors);
        observe_tile<What>(task, tile, kept, scratch.factors, neighbourhood,
                           sums + first - task.entries.first);
    }
}

// Returns what the query of a row gives to an entry with this logit; shift and factor belong to the
// row.
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

// Calls observe(KnownStatistic), so that kernels are compiled for the statistic.
template <Statistic What>
using KnownStatistic = std::integral_constant<Statistic, What>;
template <typename Observe>
inline void with_statistic(Statistic what, Observe observe) {
    switch (what) {
        case Statistic::squared_probability:
            return observe(KnownStatistic<Statistic::squared_probability>{});
        case Statistic::probability: return observe(KnownStatistic<Statistic::probability>{});
        case Statistic::product: return observe(KnownStatistic<Statistic::product>{});
        case Statistic::largest_probability:
            return observe(KnownStatistic<Statistic::largest_probability>{});
    }
}

void prompt_observe(const PromptTask& task, Statistic what, const float* row_weights,
                    float neighbourhood, float* sums) {
    with_type(task.entries.layout->type, [&](auto known) {
        with_statistic(what, [&](auto statistic) {
            prompt_observe_typed<decltype(known)::type, decltype(statistic)::value>(
                task, row_weights, neighbourhood, sums);
        });
    });
}

void logits_observe(const float* logits, int n, Statistic what, float max, float softmax_sum,
                    float* sums) {
    with_statistic(what, [&](auto known) {
        logits_observe_what<decltype(known)::value>(logits, n, max, softmax_sum, sums);
    });
}

}  // namespace
}  // namespace entropykv
