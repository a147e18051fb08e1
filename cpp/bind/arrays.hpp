// Converts vectors to NumPy arrays, and arrays to pointers.
#pragma once

#include <pybind11/numpy.h>

#include <vector>

namespace entropykv::bind {

namespace py = pybind11;

template <typename T>
using InputArray = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Copies the values into an array of any shape.
inline py::array_t<float> to_rows(const std::vector<float>& values,
                                  std::vector<py::ssize_t> shape) {
    return py::array_t<float>(std::move(shape), values.data());
}

}  // namespace entropykv::bind
