// Registers the functions that select the entries that survive.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "bind/arrays.hpp"
#include "decide/eviction.hpp"
#include "llama/flat_store.hpp"

namespace entropykv::bind {

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

}  // namespace entropykv::bind
