// The entries of a head as bytes, for session files: whole pages in the order of the page table.
//
// A state of `count` entries is pages_for(count, layout.entries) pages of layout.bytes bytes each,
// laid out as page_layout.hpp says. Entries keep their slots, so that sums over them keep their
// order; unused slots of the last page are zero. Where scores need them, the statistics of the
// queries come next (query_statistics.hpp), and where that is counted, what was dropped
// (dropped_scores.hpp: the last part, which files of version 5 lack); where entries are frozen, the
// records of the entries, how often they were detected under a schedule, and what is frozen
// (cold_state.cpp). The layout depends on the type and the shapes of the layers alone, never on the
// instruction set. Numbers are little-endian. Whoever changes the layout of a page changes the
// version of the session files with it (session/file.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "store/checkpoint.hpp"
#include "store/store_parts.hpp"

namespace entropykv {

class HeadSaver {
public:
    explicit HeadSaver(const StoreParts& parts) : parts_(parts) {}

    std::size_t bytes(int layer, int head) const;
    // Throws ColdStorageError where what is frozen cannot be read.
    void save(int layer, int head, std::byte* state) const;
    // Of a head that a checkpoint has.
    std::size_t bytes(int layer, const CheckpointHead& head) const;
    void save(int layer, const CheckpointHead& head, std::byte* state) const;
    // What is wrong with the state of a sequence of `end` tokens, or nothing.
    std::string problem(int layer, int count, const std::byte* state, std::size_t size,
                        std::int32_t end) const;

private:
    std::string problem_of_homes(const StoreLayer& layer, int count, const std::byte* state) const;

    const StoreParts& parts_;
};

class HeadLoader {
public:
    explicit HeadLoader(StoreParts& parts) : parts_(parts) {}

    // Room for the states of all heads, so many entries in each, under budgets that set_budgets()
    // will be given before load(), which does not fail then. Throws where there is none, and
    // nothing that is held has changed.
    void begin(const std::vector<int>& counts, const std::vector<const std::byte*>& states,
               const std::vector<int>& budgets);
    // Replaces a head's entries by those of a state without problems; changes the state where it
    // holds more than the head's budget, and evicts as HeadStore::set_budgets() does.
    void load(int layer, int head, int count, std::byte* state);

private:
    void load_frozen(const StoreLayer& layer, Head& head, const std::byte* state, Head& loaded);

    StoreParts& parts_;
};

}  // namespace entropykv
