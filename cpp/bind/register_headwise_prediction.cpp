// What predicts scores from keys and values, and the sums that such a function is fitted to.
#include "bind/register.hpp"

#include <pybind11/stl.h>

#include "attention/headwise.hpp"
#include "bind/arrays.hpp"
#include "store/head_rows.hpp"

namespace entropykv::bind {
namespace {

int n_features(const Headwise& self, int layer) {
    self.shape_of(layer);
    return self.store.parts().features_of(static_cast<std::size_t>(layer)).n;
}

void set_predictor(Headwise& self, int layer, const InputArray<float>& weights) {
    const LayerShape& shape = self.shape_of(layer);
    const bool fits = weights.ndim() == 2 && weights.shape(0) == shape.n_head_kv &&
                      weights.shape(1) == n_features(self, layer);
    if (!fits && weights.size() > 0)
        throw std::invalid_argument("a predictor's weights must be [n_head_kv][n_features]");
    self.store.parts().set_predictor(
        static_cast<std::size_t>(layer),
        std::vector<float>(weights.data(), weights.data() + weights.size()));
}

// Of the entries in order of their positions.
py::array_t<float> predicted_shares(const Headwise& self, int layer, int head) {
    self.check_head(layer, head);
    if (!self.store.settings().importance.predicts())
        throw std::invalid_argument("this store predicts no shares: use the measure predicted");
    std::vector<float> shares = importance_of(self.store.head(layer, head));
    for (float& share : shares) share = PackedImportance(share).share();
    return to_array(shares);
}

py::tuple lessons(const Headwise& self, int layer) {
    const LayerShape& shape = self.shape_of(layer);
    const LessonSums* lessons = self.store.parts().lessons();
    if (lessons == nullptr) throw std::invalid_argument("lessons were not collected");
    const auto number = static_cast<std::size_t>(layer);
    const py::ssize_t n = n_features(self, layer) + 1;
    return py::make_tuple(lessons->count(number),
                          py::array_t<double>(std::vector<py::ssize_t>{shape.n_head_kv, n, n},
                                              lessons->sums(number).data()));
}

}  // namespace

void register_headwise_prediction(py::class_<Headwise>& store) {
    store.def("predictor_features", &n_features, py::arg("layer"))
        .def("set_predictor", &set_predictor, py::arg("layer"), py::arg("weights"))
        .def_property_readonly(
            "is_predicted", [](const Headwise& self) { return self.store.parts().has_predictor(); })
        .def(
            "predict_stored",
            [](Headwise& self, std::int32_t n_positions, std::int32_t shift) {
                self.store.parts().predict_stored(n_positions, shift);
            },
            py::arg("n_positions"), py::arg("shift"))
        .def("predicted_shares", &predicted_shares, py::arg("layer"), py::arg("head"))
        .def(
            "collect_lessons",
            [](Headwise& self, bool on) { self.store.parts().collect_lessons(on); }, py::arg("on"))
        .def(
            "teach_stored",
            [](Headwise& self, std::int32_t begin, std::int32_t end, std::int32_t shift) {
                self.store.parts().teach_stored(begin, end, shift);
            },
            py::arg("begin"), py::arg("end"), py::arg("shift"))
        .def("lessons", &lessons, py::arg("layer"))
        .def("clear_lessons", [](Headwise& self) { self.store.parts().clear_lessons(); });
}

}  // namespace entropykv::bind
