// The attention of one reader of a layer, as one thread computes it: what its units of work need to
// know.
#pragma once

#include "attention/attention_params.hpp"
#include "attention/entropy_meter.hpp"
#include "attention/observations.hpp"
#include "attention/step.hpp"
#include "attention/unit_queue.hpp"
#include "attention/worker.hpp"
#include "store/head_store.hpp"

namespace entropykv {

struct Call {
    // Of the sequence.
    HeadStore& store;
    const KernelTable& kernels;
    const Step& step;
    EntropyMeter& entropies;
    Observations& observations;
    float* partials;  // of tiles that are split by entries: see TileWork
    // Of the node.
    int layer;
    int reader;
    Split split;
    UnitQueue& units;
    const AttentionParams& params;
    const RowsView& query;
    float* output;
    // Of the thread.
    int thread;
    Worker& worker;

    const LayerShape& shape() const { return store.shape(layer); }
    const PageLayout& layout() const { return store.layout(layer); }
    const Head& head(int number) const { return store.head(layer, number); }
    // Entries that a head attends to: stored and staged ones.
    int total(int head) const { return this->head(head).count() + step.n_tokens; }
    Unit unit(int number) const {
        const int head = units.head_of(number);
        return split.unit(head, number - units.first_unit(head), total(head));
    }
    // What an observed band of a head gave.
    float* observed(int head, int band) const {
        return observations.row(layer, head * step.observed_bands(split) + band);
    }
    // What the rows of an echo in such a band gave at most.
    float* looked_up(int head, int band) const {
        const int bands = step.observed_bands(split);
        return observations.row(layer, (shape().n_head_kv + head) * bands + band);
    }
    // What the observation window gave to every entry of a head, or null.
    float* sum_observed(int head) const {
        if (!step.observing) return nullptr;
        const int bands = step.observed_bands(split);
        return observations.sum(layer, head * bands, bands, total(head));
    }
    // The largest share that a query of the echo gave to every entry of a head, or null.
    float* most_looked_up(int head) const {
        if (!step.looking_up) return nullptr;
        const int bands = step.observed_bands(split);
        return observations.largest(layer, (shape().n_head_kv + head) * bands, bands, total(head));
    }
};

}  // namespace entropykv
