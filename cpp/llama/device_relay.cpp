#include "llama/device_relay.hpp"

#include <algorithm>
#include <new>

namespace entropykv {
namespace {

constexpr std::size_t kTensorsOfNode = 4;

}  // namespace

// Returns the tensor itself if the device can use it, otherwise a tensor that will be its copy and
// has no place yet. n_tokens: how many indices of the second dimension are needed; 0: all.
const ggml_tensor* DeviceRelay::usable(const ggml_tensor* tensor, std::int64_t n_tokens,
                                       bool is_read) {
    if (tensor == nullptr || is_usable_in(device_.memory(), tensor)) return tensor;
    ggml_tensor from = *tensor;
    if (n_tokens > 0) from.ne[1] = n_tokens;
    ggml_tensor* copy = ggml_new_tensor(context_.get(), from.type, GGML_MAX_DIMS, from.ne);
    std::copy(from.nb, from.nb + GGML_MAX_DIMS, copy->nb);
    if (is_read) to_bring_.emplace_back(from, copy);
    return copy;
}

DeviceNode DeviceRelay::bring(const DeviceNode& node) {
    context_.reset(ggml_init({kTensorsOfNode * ggml_tensor_overhead(), nullptr, true}));
    if (context_ == nullptr) throw std::bad_alloc();
    to_bring_.clear();
    const std::int64_t n_tokens = node.q->ne[1];
    const DeviceNode there{usable(node.q, 0, true), usable(node.k_cells, n_tokens, true),
                           usable(node.v_cells, n_tokens, true), usable(node.output, 0, false),
                           node.sinks};
    output_ = there.output == node.output ? nullptr : node.output;
    copied_output_ = there.output;
    allocate();
    for (auto& [from, copy] : to_bring_) {
        ggml_backend_tensor_copy(&from, copy);
        ++device_.traffic.uploads;
    }
    return there;
}

void DeviceRelay::allocate() {
    std::size_t size = 0;
    const auto each = [&](auto visit) {
        for (ggml_tensor* copy = ggml_get_first_tensor(context_.get()); copy != nullptr;
             copy = ggml_get_next_tensor(context_.get(), copy))
            visit(copy);
    };
    const auto size_of = [&](const ggml_tensor* copy) {
        return device_.aligned(ggml_backend_buft_get_alloc_size(device_.memory(), copy));
    };
    each([&](const ggml_tensor* copy) { size += size_of(copy); });
    if (size == 0) return;
    if (buffer_ == nullptr || ggml_backend_buffer_get_size(buffer_.get()) < size) {
        buffer_.reset();
        buffer_.reset(ggml_backend_buft_alloc_buffer(device_.memory(), size));
        if (buffer_ == nullptr) throw std::bad_alloc();
    }
    auto* place = static_cast<char*>(ggml_backend_buffer_get_base(buffer_.get()));
    each([&](ggml_tensor* copy) {
        if (ggml_backend_tensor_alloc(buffer_.get(), copy, place) != GGML_STATUS_SUCCESS)
            throw std::bad_alloc();
        place += size_of(copy);
    });
}

void DeviceRelay::give_back() {
    if (output_ == nullptr) return;
    ggml_tensor to = *output_;
    ggml_backend_tensor_copy(copied_output_, &to);
    ++device_.traffic.downloads;
    output_ = nullptr;
}

std::size_t DeviceRelay::bytes() const {
    return buffer_ == nullptr ? 0 : ggml_backend_buffer_get_size(buffer_.get());
}

}  // namespace entropykv
