// Where a text can be in a grammar: an automaton that is made while it is used.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "grammar/grammar_effort.hpp"
#include "grammar/grammar_rules.hpp"
#include "grammar/number_map.hpp"

namespace entropykv {

// A state is a set of stacks; a stack says which symbols must still follow, the next one on top.
// Equal stacks and equal states have one number, so that what was found out once is known.
class GrammarStates {
public:
    using State = std::uint32_t;
    static constexpr State kDead = 0;  // no text that goes on from here is in the grammar

    // The grammar must outlive this.
    GrammarStates(const GrammarRules& grammar, const GrammarLimits& limits, GrammarEffort& effort);

    // Where a text begins. This, and what follows, throws std::length_error where a limit is
    // reached, and what the poll of the effort throws.
    State start();
    State after_character(State state, std::uint32_t code_point);
    State after_token(State state, std::uint32_t token);
    State either(State a, State b);

    // Whether the text may end here.
    bool may_end(State state) const;
    // Whether a character from `first` to `last` may follow.
    bool may_follow(State state, std::uint32_t first, std::uint32_t last);
    // Calls visit(symbol) for every token, or other token, that may follow.
    template <typename Visit>
    void each_token(State state, const Visit& visit) const {
        for (std::uint32_t i = begins_[state]; i < begins_[state + 1]; i++)
            if (const Symbol next = top(members_[i]);
                next.kind == SymbolKind::token || next.kind == SymbolKind::other_token)
                visit(next);
    }

    // Forgets everything but one state, once much is kept; returns its new number, and whether
    // anything was forgotten. Numbers that were got before are no longer valid then.
    std::pair<State, bool> tidy(State state);

private:
    struct Stack {
        // The top: an index of the grammar's symbols or, behind those, how often something must or
        // may still come: an index of `counts_`.
        std::uint32_t symbol;
        std::uint32_t below;  // the stack below it
    };
    static constexpr std::uint32_t kEmpty = 0;  // the stack with nothing on it

    Symbol top(std::uint32_t stack) const;
    std::uint32_t push(std::uint32_t symbol, std::uint32_t below);
    std::uint32_t past(std::uint32_t stack);
    bool is_count(std::uint32_t stack) const;
    std::uint32_t push_count(std::uint32_t repetition, std::uint32_t n_times, std::uint32_t below);
    void search_count(std::uint32_t stack);
    void begin_search();
    void search(std::uint32_t stack);
    State number_of_found();
    std::uint64_t class_of(std::uint32_t code_point) const;
    void find_classes();
    void check_kept() const;
    void clear();

    const GrammarRules& grammar_;
    std::vector<std::uint32_t> counts_;  // of every repetition, the symbol that is none of it
    GrammarLimits limits_;
    GrammarEffort& effort_;
    std::vector<std::uint32_t> classes_;  // first code points of those that sets do not tell apart
    std::array<std::uint32_t, 128> ascii_classes_{};

    std::vector<Stack> stacks_;
    NumberMap stack_numbers_;
    std::vector<std::uint32_t> members_;  // the stacks of all states
    std::vector<std::uint32_t> begins_;   // where those of each state begin, and the end
    std::vector<State> same_hash_;        // of each state, the one before it with the same hash
    NumberMap state_numbers_;             // by hash
    NumberMap transitions_;               // by state and class

    std::vector<std::uint32_t> seen_;  // in which search a stack was seen last
    std::uint32_t search_ = 0;
    std::vector<std::uint32_t> todo_;
    std::vector<std::uint32_t> found_;
};

}  // namespace entropykv
