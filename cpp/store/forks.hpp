// Pages that several sequences hold: a checkpoint of a store, and a store that goes on from one.
// See HeadPages for who may write to them.
#pragma once

#include <memory>

#include "store/checkpoint.hpp"
#include "store/store_parts.hpp"

namespace entropykv {

class HeadStore;

// What is held now, its pages shared: between micro-batches, of a store that does not freeze.
std::unique_ptr<Checkpoint> make_checkpoint(StoreParts& parts);

// Replaces what is held by what a checkpoint of the same pool has, and evicts as
// HeadStore::set_budgets() does. ends: the checkpoint is dropped, so that what nobody else owns
// need not be copied. False where the pool has no room for the copies: then nothing is held, and
// the checkpoint is as it was. Throws std::invalid_argument for one of another pool, or a dropped
// one.
bool go_on_from(HeadStore& store, Checkpoint& from, bool ends);

// A head as a checkpoint of the same pool has it. Throws as go_on_from().
const CheckpointHead& head_of(const StoreParts& parts, const Checkpoint& from, int layer, int head);

}  // namespace entropykv
