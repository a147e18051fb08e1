// The frozen entries of a head as bytes, for session files: three 32-bit numbers (pages of records,
// the open page, its entries), the records, the open page as the store has it, then the packed rows
// of every other page that has records. Numbers are little-endian. Whoever changes any of it
// changes the version of the session files with it (session/file.py).
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
    bool save(std::byte* state) const;  // false where storage failed
    // As without records.
    static std::size_t empty_bytes();
    static void save_empty(std::byte* state);
    // What is wrong with a state, or nothing; seen: by position, what the head holds, and then
    // what is frozen, too.
    std::string problem(const std::byte* state, std::size_t size, std::vector<bool>& seen) const;
    // Whether a record of a state without problems is that of an active entry at the position.
    static bool is_home(const std::byte* state, int record, int per_page, std::int32_t position);

private:
    const ColdHead& head_;
};

class ColdLoader {
public:
    explicit ColdLoader(ColdHead& head) : head_(head) {}

    // Room for load(), and for n_new calls of ColdHead::add() after it.
    void begin(const std::byte* state, int n_new);
    // Returns how many frozen entries the limit dropped: their records are dead.
    int load(const std::byte* state, const ImportanceSettings& settings, const KernelTable& kernels,
             std::byte* buffer);

private:
    void count_records(int page);

    ColdHead& head_;
};

}  // namespace entropykv
