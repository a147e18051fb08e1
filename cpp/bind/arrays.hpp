// Converts vectors to NumPy arrays, and arrays and buffers to pointers.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <stdexcept>
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

struct WritableBytes {
    std::byte* data;
    std::size_t size;
};

// Returns the bytes of a bytearray, or of another object with a buffer of bytes that may be
// changed; they are valid while it exists. Throws std::invalid_argument for any other object.
inline WritableBytes bytes_of(const py::buffer& buffer) {
    const py::buffer_info info = buffer.request(true);
    if (info.itemsize != 1 || info.ndim != 1 || info.strides[0] != 1)
        throw std::invalid_argument("a state must be a buffer of bytes");
    return {static_cast<std::byte*>(info.ptr), static_cast<std::size_t>(info.size)};
}

template <typename Byte>
std::vector<Byte*> addresses_of(const std::vector<py::buffer>& buffers) {
    std::vector<Byte*> addresses;
    for (const py::buffer& buffer : buffers) addresses.push_back(bytes_of(buffer).data);
    return addresses;
}

}  // namespace entropykv::bind
