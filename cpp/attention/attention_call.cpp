#include "attention/attention_call.hpp"

#include "platform/scratch.hpp"
#include "store/recall.hpp"

namespace entropykv {

void Worker::serve(const PageLayout& layout, bool recalls) {
    const auto rows = static_cast<std::size_t>(kRowTile);
    grow(query_, rows * PageLayout::index(layout.k_stride));
    grow(output_, rows * PageLayout::index(layout.v_stride));
    grow(kernel_, prompt_scratch_floats(layout));
    grow(softmax_, 7 * rows);
    if (!recalls) return;
    grow(recall_, PageLayout::index(kMostQueryRows * (layout.k_stride + 1)));
    recall_positions_.resize(kMostQueryRows);
}

void Worker::keep(std::size_t n_floats) { grow(kept_, n_floats); }

void Worker::release() { std::vector<float>().swap(kept_); }

std::size_t Worker::bytes() const {
    return bytes_of(query_) + bytes_of(output_) + bytes_of(kernel_) + bytes_of(kept_) +
           bytes_of(softmax_) + bytes_of(recall_) + bytes_of(recall_positions_);
}

std::size_t bytes_of_workers(const Workers& workers) {
    std::size_t bytes = 0;
    for (const Worker& worker : workers) bytes += worker.bytes();
    return bytes;
}

}  // namespace entropykv
