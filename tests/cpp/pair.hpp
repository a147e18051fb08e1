// Holds a sequence in a pool beside the same sequence alone, for tests of pools.
#pragma once

#include <memory>

#include "testing.hpp"

struct Pair {
    Pair(const std::vector<LayerShape>& layers, const StoreSettings& settings,
         const std::shared_ptr<StorePool>& pool, int n_threads = 1,
         const std::shared_ptr<Workers>& workers = nullptr)
        : shared(layers, settings, pool),
          attention(shared, *available_kernels().back(), n_threads, workers),
          alone(layers, settings),
          attention_alone(alone, *available_kernels().back(), 1) {
        set_predictor(shared);
        set_predictor(alone);
    }

    void truncate(std::int32_t position) {
        end = position;
        shared.truncate(position);
        alone.truncate(position);
    }

    // Checks that both hold the same in every layer.
    void compare() const {
        CHECK(shared.evicted() == alone.evicted());
        CHECK(shared.frozen().now() == alone.frozen().now());
        for (int layer = 0; layer < shared.n_layers(); ++layer)
            for (int head = 0; head < shared.shape(layer).n_head_kv; ++head)
                CHECK(hold_the_same(shared.head(layer, head), alone.head(layer, head)));
    }

    HeadStore shared;
    Attention attention;
    HeadStore alone;
    Attention attention_alone;
    std::int32_t end = 0;
};
