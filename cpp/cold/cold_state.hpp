// Saves the frozen entries of a head as bytes for session files: three 32-bit numbers (how many
// pages of records, the open page, its entries), the records, the rows of the open page as the
// store has them, then the packed rows of all other pages that have records. Numbers are
// little-endian. A change needs a new version of the session files (session/file.py).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cold/cold_head.hpp"

namespace entropykv {

class ColdSaver {
public:
    explicit ColdSaver(const ColdHead& head) : head_(head) {}

    std::size_t bytes() const;
    bool save(std::byte* state) const;  // returns false if storage failed
    // Do what bytes() and save() do, for a head without records.
    static std::size_t empty_bytes();
    static void save_empty(std::byte* state);
    // Returns what is wrong with a state, or an empty string. seen: whether the head holds each
    // position; frozen positions are marked, too.
    std::string problem(const std::byte* state, std::size_t size, std::vector<bool>& seen) const;
    // Tells whether a record of a valid state is that of a restored entry at the position.
    static bool is_restored_record(const std::byte* state, int record, int per_page,
                                   std::int32_t position);

private:
    const ColdHead& head_;
};

class ColdLoader {
public:
    explicit ColdLoader(ColdHead& head) : head_(head) {}

    // Makes room for load(), and for n_new calls of ColdHead::add() after it. Throws what
    // ColdStorage::take() throws.
    void begin(const std::byte* state, int n_new);
    // Replaces all records by those of a valid state. Returns how many frozen entries were dropped
    // because of the limit; their records are free. buffer: has room for a page of the store.
    int load(const std::byte* state, const ImportanceSettings& settings, const KernelTable& kernels,
             std::byte* buffer);

private:
    void count_records(int page);

    ColdHead& head_;
};

}  // namespace entropykv
