// What calibration looks at: attention rows of the last micro-batch, and entries.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise.hpp"
#include "bind/arrays.hpp"
#include "store/head_rows.hpp"

namespace entropykv::bind {

void register_headwise_observation(py::class_<Headwise>& store) {
    store
        .def(
            "row_entropies",
            [](const Headwise& self, int layer) {
                const LayerShape& shape = self.shape_of(layer);
                const std::vector<float> rows = self.attention.entropies().last_rows(layer);
                if (rows.empty()) throw std::invalid_argument("entropies were not tracked");
                return to_rows(rows, {self.attention.step().n_text, shape.n_head});
            },
            py::arg("layer"))
        .def(
            "capture_queries", [](Headwise& self, bool on) { self.attention.queries().turn(on); },
            py::arg("on"))
        .def(
            "queries",
            [](const Headwise& self, int layer) {
                const LayerShape& shape = self.shape_of(layer);
                const QueryCapture::Rows& capture = self.attention.queries().of(layer);
                const int n_tokens = self.attention.step().n_tokens;
                const auto size = static_cast<std::size_t>(n_tokens * shape.n_head * shape.k_dim);
                if (capture.queries.size() != size)
                    throw std::invalid_argument("queries were not captured");
                return py::make_tuple(
                    to_rows(capture.queries, {n_tokens, shape.n_head, shape.k_dim}),
                    to_array(capture.sinks), capture.softcap, shape.window, shape.chunked,
                    to_array(capture.slopes));
            },
            py::arg("layer"))
        .def(
            "rows",
            [](const Headwise& self, int layer, int head) {
                self.check_head(layer, head);
                StoredRows rows = rows_of(self.store.head(layer, head));
                for (float& importance : rows.importance)
                    importance = self.store.settings().importance.score_of(importance);
                const auto n = static_cast<py::ssize_t>(rows.positions.size());
                const LayerShape& shape = self.store.shape(layer);
                return py::make_tuple(to_array(rows.positions), to_array(rows.importance),
                                      to_rows(rows.k, {n, shape.k_dim}),
                                      to_rows(rows.v, {n, shape.v_dim}));
            },
            py::arg("layer"), py::arg("kv_head"));
}

}  // namespace entropykv::bind
