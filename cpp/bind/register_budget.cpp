// Registers the functions that compute budgets of KV heads.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <functional>

#include "bind/arrays.hpp"
#include "decide/budget.hpp"
#include "decide/dropped_scores.hpp"
#include "store/layer_shape.hpp"

namespace entropykv::bind {

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

}  // namespace entropykv::bind
