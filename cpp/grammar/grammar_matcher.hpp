// Tells which tokens a grammar allows after those that were accepted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "grammar/grammar_effort.hpp"
#include "grammar/grammar_rules.hpp"
#include "grammar/grammar_states.hpp"
#include "grammar/token_trie.hpp"

namespace entropykv {

// A token that may be sampled, as llama.cpp's samplers represent it.
struct TokenCandidate {
    std::int32_t token;
    float logit;
    float probability;
};

// Must be used by one thread at a time. Every function throws std::length_error if a limit is
// reached, and passes on what `poll` throws.
class GrammarMatcher {
public:
    GrammarMatcher(std::shared_ptr<const GrammarRules> grammar,
                   std::shared_ptr<const TokenTrie> trie, const GrammarLimits& limits,
                   std::function<void()> poll);
    GrammarMatcher(const GrammarMatcher&) = delete;
    GrammarMatcher& operator=(const GrammarMatcher&) = delete;

    // Sets the logit of all candidates that are not allowed to -infinity.
    void apply(TokenCandidate* candidates, std::size_t n_candidates);
    // Moves on by one token. Throws std::invalid_argument if it is not allowed.
    void accept(std::int32_t token);
    // Tells whether the text may end here.
    bool may_end() const { return position_.is_whole() && states_.may_end(position_.state); }

private:
    // A state, and the bits of a character whose last bytes are still missing.
    struct Position {
        GrammarStates::State state = GrammarStates::kDead;
        std::uint32_t bits = 0;
        std::uint32_t n_missing = 0;

        bool is_whole() const { return n_missing == 0; }
    };
    using Allowed = std::vector<bool>;  // tells for every token whether it is allowed

    const Allowed& allowed();
    void walk(Allowed& allowed);
    void add_tokens(Allowed& allowed);
    Position after_byte(Position position, std::uint8_t byte);
    bool lives(const Position& position);

    std::shared_ptr<const GrammarRules> grammar_;
    std::shared_ptr<const TokenTrie> trie_;
    GrammarEffort effort_;
    GrammarStates states_;
    Position position_;
    std::vector<Position> path_;  // has the positions above the current trie node, by depth
    // Answers for positions that recur often, for example within a string.
    std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, Allowed> answers_;
};

}  // namespace entropykv
