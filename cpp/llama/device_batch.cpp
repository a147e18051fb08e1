#include "llama/device_batch.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>

namespace entropykv {

void DeviceBatch::clear() {
    parts_.clear();
    n_tokens_ = 0;
    fault_.clear();
}

void DeviceBatch::add(DeviceStore& store, int n_tokens, std::int32_t position,
                      std::int32_t rope_position, int n_drafts) {
    if (std::find(parts_.begin(), parts_.end(), &store) != parts_.end())
        throw std::invalid_argument("a sequence has one part of a micro-batch");
    parts_.reserve(parts_.size() + 1);
    store.reserve(n_tokens, position, rope_position, n_tokens_, n_drafts);
    parts_.push_back(&store);
    n_tokens_ += n_tokens;
}

void DeviceBatch::attend(int layer, const DeviceNode& node) noexcept {
    if (!fault_.empty()) return;
    try {
        if (node.q->ne[1] != n_tokens_)
            throw std::runtime_error("a graph reads another number of tokens than the session");
        for (DeviceStore* store : parts_) store->attend(layer, node);
    } catch (const std::bad_alloc&) {
        fault_ = "a device has no memory left to compute attention";
    } catch (const std::exception& error) {
        fault_ = error.what();
    }
}

void DeviceBatch::check_step() const {
    if (!fault_.empty()) throw std::runtime_error(fault_);
}

}  // namespace entropykv
