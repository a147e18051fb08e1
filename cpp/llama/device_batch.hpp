// Computes the attention of a micro-batch that holds tokens of several sequences, each of which
// attends to its own range of tokens with its own store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llama/device_store.hpp"

namespace entropykv {

class DeviceBatch {
public:
    // Begins another micro-batch, which has no tokens yet.
    void clear();
    // Adds the next tokens, which belong to a sequence without tokens in this micro-batch; the
    // store must live until clear(). RoPE sees the first of them at `rope_position`. The last
    // n_drafts are drafts. If this throws, nothing was added.
    void add(DeviceStore& store, int n_tokens, std::int32_t position, std::int32_t rope_position,
             int n_drafts = 0);

    // Computes the attention of all sequences for the next layer of the model that reads a layer's
    // K and V. GraphHook calls this between two nodes, so errors are kept for check_step().
    void attend(int layer, const DeviceNode& node) noexcept;
    // Throws std::runtime_error with what went wrong since clear().
    void check_step() const;

private:
    std::vector<DeviceStore*> parts_;
    int n_tokens_ = 0;
    std::string fault_;
};

}  // namespace entropykv
