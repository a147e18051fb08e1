// Makes checkpoints of a store, and lets a store continue from one; both share pages. HeadPages
// explains who may write to them.
#pragma once

#include <memory>

#include "store/checkpoint.hpp"
#include "store/store_components.hpp"

namespace entropykv {

class HeadStore;

// Returns a checkpoint of what the store holds now. Must be called between micro-batches, and
// throws std::logic_error if the store freezes entries.
std::unique_ptr<Checkpoint> make_checkpoint(StoreComponents& components);

// Replaces the entries of the store by those of a checkpoint of the same pool, and evicts what
// exceeds the budgets. If `ends` is true, the checkpoint is dropped, and pages that only it owned
// need not be copied. Returns false if the pool has no room for the copies: then the store is empty
// and the checkpoint unchanged. Throws std::invalid_argument if the checkpoint belongs to another
// pool or was dropped.
bool fork_from(HeadStore& store, Checkpoint& from, bool ends);

// Returns a KV head of a checkpoint of the same pool. Throws like fork_from().
const CheckpointHead& checkpoint_head(const StoreComponents& components, const Checkpoint& from,
                                      int layer, int head);

}  // namespace entropykv
