// Holds a parsed grammar: rules consist of alternatives, and alternatives of symbols.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace entropykv {

enum class SymbolKind : std::uint8_t {
    end,          // the end of an alternative
    characters,   // any character of a set
    rule,         // whatever another rule matches
    token,        // one token of the vocabulary
    other_token,  // any token but this one
};

struct Symbol {
    SymbolKind kind = SymbolKind::end;
    std::uint32_t value = 0;  // number of the set, the rule or the token
};

struct CharacterRange {
    std::uint32_t first = 0;
    std::uint32_t last = 0;
};

// A set of code points: those in the ranges, or if inverted, all others.
class CharacterSet {
public:
    CharacterSet() = default;
    CharacterSet(std::vector<CharacterRange> ranges, bool inverted);

    bool has(std::uint32_t code_point) const;
    // Tells whether the set has any code point from `first` to `last`.
    bool has_any(std::uint32_t first, std::uint32_t last) const;

    const std::vector<CharacterRange>& ranges() const { return ranges_; }

private:
    std::vector<CharacterRange> ranges_;  // are sorted and disjoint
    bool inverted_ = false;
};

struct GrammarRules {
    struct Rule {
        std::uint32_t first = 0;  // index of its first alternative
        std::uint32_t count = 0;
        std::uint32_t part_of = 0;  // the named rule that it was made for, or itself
        // Is the index of its repetition, which replaces its alternatives.
        std::uint32_t counted = kNotCounted;
    };
    // Matches a symbol `least` to `most` times, without a rule for every number of times.
    struct Repetition {
        std::uint32_t part = 0;  // index in `symbols` of the symbol, which has an end behind it
        std::uint32_t least = 0;
        std::uint32_t most = 0;
        bool endless = false;  // no upper limit
    };
    static constexpr std::uint32_t kNotCounted = UINT32_MAX;

    std::vector<Symbol> symbols;  // has the symbols of all alternatives, each with its end
    std::vector<std::uint32_t> alternatives;  // where each one begins in `symbols`
    std::vector<Rule> rules;
    std::vector<std::string> names;  // has the names of rules; empty for those that the parser made
    std::vector<CharacterSet> sets;
    std::vector<Repetition> repetitions;
    std::uint32_t root = 0;

    // Returns the name of a rule for a message, shortened if it is very long.
    std::string name_of(std::size_t rule) const { return names[rules[rule].part_of].substr(0, 60); }
};

// Throws std::invalid_argument if a rule begins with itself and something follows, since matching
// it would never end. A rule may repeat itself without reading anything.
void check_left_recursion(const GrammarRules& grammar);

}  // namespace entropykv
