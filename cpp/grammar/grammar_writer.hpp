// Builds the rules of a grammar: collects symbols, numbers names and sets, and makes repetitions.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "grammar/grammar_effort.hpp"
#include "grammar/grammar_rules.hpp"

namespace entropykv {

// Functions throw std::invalid_argument if a grammar exceeds its limits.
class GrammarWriter {
public:
    using Sequence = std::vector<Symbol>;
    static constexpr std::uint64_t kNoEnd = UINT64_MAX;

    explicit GrammarWriter(const GrammarLimits& limits) : limits_(limits) {}

    // Counts symbols that were read.
    void count(std::uint64_t n_symbols);
    // Returns the rule with a name; its alternatives may be added later.
    std::uint32_t rule_of(const std::string& name);
    // Adds a rule that is a part of another one.
    std::uint32_t part_of(std::uint32_t rule);
    void write(std::uint32_t rule, const std::vector<Sequence>& alternatives);
    // Returns a sequence that matches `item` (one symbol or more) `least` to `most` times; new
    // rules become parts of `rule`.
    Sequence repeated(std::uint32_t rule, Sequence item, std::uint64_t least, std::uint64_t most);
    Symbol set_of(std::vector<CharacterRange> ranges, bool inverted);
    // Returns the grammar. Throws std::invalid_argument if a rule is missing.
    GrammarRules finish(const std::string& root);

private:
    std::uint32_t add_rule(const std::string& name);
    std::uint32_t write_part(std::uint32_t rule, const std::vector<Sequence>& alternatives);
    Symbol counted(std::uint32_t rule, Symbol part, std::uint64_t least, std::uint64_t most);

    GrammarLimits limits_;
    GrammarRules grammar_;
    std::unordered_map<std::string, std::uint32_t> names_;
    // Has the numbers of sets with one character.
    std::unordered_map<std::uint32_t, std::uint32_t> singles_;
    std::uint64_t n_symbols_ = 0;
    std::uint64_t n_repeats_ = 0;
};

}  // namespace entropykv
