// Registers the functions that compute budgets of KV heads and select the entries that survive.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <functional>

#include "bind/arrays.hpp"
#include "decide/budget.hpp"
#include "decide/dropped_scores.hpp"
#include "decide/eviction.hpp"
#include "llama/flat_store.hpp"
#include "store/layer_shape.hpp"

namespace entropykv::bind {
namespace {

void register_budget(py::module_& m) {
    m.def("entropy_weights", &entropy_weights, py::arg("entropies"), py::arg("mean"),
          py::arg("low"), py::arg("high"));
    m.def(
        "share_budget",
        [](int mean_entries, int max_entries, int floor_entries, std::vector<int> entries_per_page,
           std::vector<double> weights, std::vector<int> limits) {
            return share_budget({mean_entries, max_entries, floor_entries,
                                 std::move(entries_per_page), std::move(weights),
                                 std::move(limits)});
        },
        py::arg("mean_entries"), py::arg("max_entries"), py::arg("floor_entries"),
        py::arg("entries_per_page"), py::arg("weights"), py::arg("limits") = std::vector<int>{});
    m.def(
        "losses_at",
        [](const InputArray<float>& scores, const std::vector<int>& knots,
           const std::vector<float>& dropped, float unit) {
            std::vector<float> sorted(scores.data(), scores.data() + scores.size());
            std::sort(sorted.begin(), sorted.end(), std::greater<float>());
            std::vector<float> losses(knots.size());
            DroppedScores of_dropped;
            for (const float score : dropped) of_dropped.add(score);
            losses_at(sorted.data(), static_cast<int>(sorted.size()), of_dropped, unit, knots,
                      losses.data());
            return to_array(losses);
        },
        py::arg("scores"), py::arg("knots"), py::arg("dropped") = std::vector<float>{},
        py::arg("unit") = 1.0f);
    m.def(
        "curve_shares",
        [](std::vector<double> knots, std::vector<double> losses, double total) {
            return curve_shares({std::move(knots), std::move(losses)}, total);
        },
        py::arg("knots"), py::arg("losses"), py::arg("total"));
    m.def(
        "share_by_curves",
        [](int mean_entries, int max_entries, int floor_entries, std::vector<int> entries_per_page,
           std::vector<double> knots, std::vector<double> losses, std::vector<int> limits) {
            return share_by_curves({mean_entries,
                                    max_entries,
                                    floor_entries,
                                    std::move(entries_per_page),
                                    {},
                                    std::move(limits)},
                                   {std::move(knots), std::move(losses)});
        },
        py::arg("mean_entries"), py::arg("max_entries"), py::arg("floor_entries"),
        py::arg("entries_per_page"), py::arg("knots"), py::arg("losses"),
        py::arg("limits") = std::vector<int>{});
    m.def(
        "pages_for",
        [](int entries, int per_page) {
            if (entries > kMostPositions || per_page < 1)
                throw std::invalid_argument("pages hold 1 entry or more, of 2^30 at most");
            return pages_for(entries, per_page);
        },
        py::arg("entries"), py::arg("entries_per_page"));
}

void register_eviction(py::module_& m) {
    m.def(
        "select_survivors",
        [](const InputArray<float>& scores, const InputArray<std::int32_t>& positions, int keep,
           int n_sinks, int recent_window, std::int32_t newest) {
            if (scores.size() != positions.size())
                throw std::invalid_argument("scores and positions must have one length");
            const auto n = static_cast<int>(scores.size());
            std::vector<std::uint8_t> kept(static_cast<std::size_t>(n));
            std::vector<float> scratch(static_cast<std::size_t>(n));
            select_survivors(scores.data(), positions.data(), n, keep, {n_sinks, recent_window},
                             newest, kept.data(), scratch.data());
            return to_array(kept);
        },
        py::arg("scores"), py::arg("positions"), py::arg("keep"), py::arg("n_sinks"),
        py::arg("recent_window"), py::arg("newest"));
    m.def(
        "entries_to_keep",
        [](int budget, int n_new, int n_sinks, int recent_window) {
            return entries_to_keep(budget, n_new, {n_sinks, recent_window});
        },
        py::arg("budget"), py::arg("n_new"), py::arg("n_sinks"), py::arg("recent_window"));
    m.def(
        "plan_flat_eviction",
        [](const std::vector<std::int32_t>& positions, int keep, ScoreKind score, int n_sinks,
           int recent_window) {
            const FlatEviction plan =
                plan_flat_eviction(positions, keep, score, {n_sinks, recent_window});
            return py::make_tuple(to_array(plan.kept), plan.removed);
        },
        py::arg("positions"), py::arg("keep"), py::arg("score"), py::arg("n_sinks"),
        py::arg("recent_window"));
}

}  // namespace

void register_decisions(py::module_& m) {
    register_budget(m);
    register_eviction(m);
}

}  // namespace entropykv::bind
