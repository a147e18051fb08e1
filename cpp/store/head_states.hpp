// Saves the entries of a head as bytes for session files, and loads them.
// A state of `count` entries starts with pages_for(count, layout.entries) pages of layout.bytes
// bytes each, in the order of the page table, laid out as page_layout.hpp says. Entries keep their
// slots, so that sums over them are computed in the same order; unused slots of the last page are
// zero. What follows has no certain alignment. If dropped entries are counted, their scores follow
// (dropped_scores.hpp). If entries are frozen, the next parts are the record numbers of the held
// entries, how often they were detected under a schedule, and the frozen entries (cold_state.cpp).
// The layout depends on the KV type and the shapes of the layers, not on the instruction set. In
// files, zeros follow until the size is a multiple of a page of the pool: see HeadSaver::padding().
// Numbers are little-endian. A change of the page layout needs a new version of the session files
// (session/file.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/checkpoint.hpp"
#include "store/store_components.hpp"

namespace entropykv {

// Returns what is wrong with the positions and the importance in the pages of a state of `count`
// entries, or null. seen: by position of the text, whether an entry had it.
const char* entries_problem(const PageLayout& layout, const std::byte* state, int count,
                            std::vector<bool>& seen);

class HeadSaver {
public:
    explicit HeadSaver(const StoreComponents& components) : components_(components) {}

    std::size_t bytes(int layer, int head) const;
    // Throws ColdStorageError if a frozen entry cannot be read.
    void save(int layer, int head, std::byte* state) const;
    // Returns how many zeros follow a head's state in a file, so that all states lie as pages in a
    // pool: 0 if that is impossible, because entries freeze or layers have other pages.
    std::size_t padding(int layer, int head) const;
    // Do the same for a KV head of a checkpoint, whatever the store holds now.
    std::size_t bytes(int layer, const CheckpointHead& head) const;
    void save(int layer, const CheckpointHead& head, std::byte* state) const;
    // Returns what is wrong with the state of a sequence of `end` tokens, which may have its
    // padding, or an empty string.
    std::string problem(int layer, int count, const std::byte* state, std::size_t size,
                        std::int32_t end) const;

private:
    std::size_t padding_of(const StoreLayer& layer, int count) const;
    std::string problem_of_record_numbers(const StoreLayer& layer, int count,
                                          const std::byte* state) const;

    const StoreComponents& components_;
};

class HeadLoader {
public:
    explicit HeadLoader(StoreComponents& components) : components_(components) {}

    // Makes room for the states of all heads, with counts[head] entries each, under budgets that
    // set_budgets() will set before load(). Then load() cannot fail. Throws std::bad_alloc or
    // ColdStorageError if there is no room, and then changes no entry.
    void begin(const std::vector<int>& counts, const std::vector<const std::byte*>& states,
               const std::vector<int>& budgets);
    // Replaces the entries of a head by those of a state that problem() accepts. If the state holds
    // more than the head's budget, entries are evicted, and `state` is used as scratch.
    void load(int layer, int head, int count, std::byte* state);
    // Replaces the entries of all heads, which must be empty, by those of states in a mapped file,
    // where they are: nothing is copied until an entry is evicted or added to a page. begin() comes
    // first, as for load(). Returns false, and changes nothing, if that is impossible: if the
    // states are not what the file begins with, are not padded to whole pages of the pool, or
    // exceed the heads' budgets, or if the pool has no room for a range.
    bool adopt(const std::shared_ptr<MappedFile>& file, const std::vector<int>& counts,
               const std::vector<const std::byte*>& states);

private:
    bool are_pages(MappedFile& file, const std::vector<int>& counts,
                   const std::vector<const std::byte*>& states) const;
    void load_frozen(const StoreLayer& layer, Head& head, const std::byte* state, Head& loaded);

    StoreComponents& components_;
};

}  // namespace entropykv
