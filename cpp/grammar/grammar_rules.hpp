// What a grammar says: rules, each of alternatives, each of symbols.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace entropykv {

enum class SymbolKind : std::uint8_t {
    end,          // of an alternative
    characters,   // one character of a set
    rule,         // what another rule says
    token,        // one token of the vocabulary
    other_token,  // any token but this one
};

struct Symbol {
    SymbolKind kind = SymbolKind::end;
    std::uint32_t value = 0;  // number of the set, of the rule, or of the token
};

struct CharacterRange {
    std::uint32_t first = 0;
    std::uint32_t last = 0;
};

// Code points: those of the ranges or, if inverted, all others.
class CharacterSet {
public:
    CharacterSet() = default;
    CharacterSet(std::vector<CharacterRange> ranges, bool inverted);

    bool has(std::uint32_t code_point) const;
    // Whether any code point from `first` to `last` is in the set.
    bool has_any(std::uint32_t first, std::uint32_t last) const;

    const std::vector<CharacterRange>& ranges() const { return ranges_; }

private:
    std::vector<CharacterRange> ranges_;  // in order, and apart from each other
    bool inverted_ = false;
};

struct GrammarRules {
    struct Rule {
        std::uint32_t first = 0;  // of its alternatives
        std::uint32_t count = 0;
        std::uint32_t part_of = 0;            // the rule with a name that it was made for, or is
        std::uint32_t counted = kNotCounted;  // its repetition, which stands for its alternatives
    };
    // A symbol `least` to `most` times; alternatives would need a rule for every number of them.
    struct Repetition {
        std::uint32_t part = 0;  // the symbol, with an end behind it, as an index of `symbols`
        std::uint32_t least = 0;
        std::uint32_t most = 0;
        bool endless = false;  // any number of times, then
    };
    static constexpr std::uint32_t kNotCounted = UINT32_MAX;

    std::vector<Symbol> symbols;              // of all alternatives, each with its end
    std::vector<std::uint32_t> alternatives;  // where each begins in `symbols`
    std::vector<Rule> rules;
    std::vector<std::string> names;  // of the rules; empty where the parser made one
    std::vector<CharacterSet> sets;
    std::vector<Repetition> repetitions;
    std::uint32_t root = 0;

    // The name for a message, which a name of any length must fit in.
    std::string name_of(std::size_t rule) const { return names[rules[rule].part_of].substr(0, 60); }
};

// Throws std::invalid_argument where a rule begins with itself, and something follows: matching it
// would never end. That it repeats itself without having read anything is harmless.
void check_left_recursion(const GrammarRules& grammar);

}  // namespace entropykv
