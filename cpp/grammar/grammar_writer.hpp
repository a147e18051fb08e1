// Puts rules together: their symbols, the numbers of names and sets, and repetitions.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "grammar/grammar_effort.hpp"
#include "grammar/grammar_rules.hpp"

namespace entropykv {

// Throws std::invalid_argument where a grammar grows beyond its limits.
class GrammarWriter {
public:
    using Sequence = std::vector<Symbol>;
    static constexpr std::uint64_t kNoEnd = UINT64_MAX;

    explicit GrammarWriter(const GrammarLimits& limits) : limits_(limits) {}

    // Counts symbols that are being read.
    void count(std::uint64_t n_symbols);
    // The rule of a name, whose alternatives may come later.
    std::uint32_t rule_of(const std::string& name);
    // A new rule, which is a part of another one.
    std::uint32_t part_of(std::uint32_t rule);
    void write(std::uint32_t rule, const std::vector<Sequence>& alternatives);
    // What a sequence of one symbol or more is, `least` to `most` times; a part of `rule`.
    Sequence repeated(std::uint32_t rule, Sequence item, std::uint64_t least, std::uint64_t most);
    Symbol set_of(std::vector<CharacterRange> ranges, bool inverted);
    // The grammar. Throws std::invalid_argument where a rule is missing.
    GrammarRules finish(const std::string& root);

private:
    std::uint32_t add_rule(const std::string& name);
    std::uint32_t write_part(std::uint32_t rule, const std::vector<Sequence>& alternatives);
    Symbol counted(std::uint32_t rule, Symbol part, std::uint64_t least, std::uint64_t most);

    GrammarLimits limits_;
    GrammarRules grammar_;
    std::unordered_map<std::string, std::uint32_t> names_;
    std::unordered_map<std::uint32_t, std::uint32_t> singles_;  // sets of one character
    std::uint64_t n_symbols_ = 0;
    std::uint64_t n_repeats_ = 0;
};

}  // namespace entropykv
