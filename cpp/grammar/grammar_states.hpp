// Follows a text through a grammar, with an automaton that is built while it is used.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "grammar/grammar_effort.hpp"
#include "grammar/grammar_rules.hpp"
#include "grammar/number_map.hpp"

namespace entropykv {

// A state is a set of stacks. A stack holds the symbols that must still follow; the next one is on
// top. Equal stacks and equal states have the same number, so that results can be reused.
class GrammarStates {
public:
    using State = std::uint32_t;
    static constexpr State kDead = 0;  // no text in the grammar continues from here

    // The grammar must outlive this object.
    GrammarStates(const GrammarRules& grammar, const GrammarLimits& limits, GrammarEffort& effort);

    // Returns the state at the beginning of a text. This and the following functions throw
    // std::length_error if a limit is reached, and pass on what the poll of the effort throws.
    State start();
    State after_character(State state, std::uint32_t code_point);
    State after_token(State state, std::uint32_t token);
    State either(State a, State b);

    // Tells whether the text may end here.
    bool may_end(State state) const;
    // Tells whether a character from `first` to `last` may follow.
    bool may_follow(State state, std::uint32_t first, std::uint32_t last);
    // Calls visit(symbol) for every symbol `token` or `other_token` that may follow.
    template <typename Visit>
    void each_token(State state, const Visit& visit) const {
        for (std::uint32_t i = begins_[state]; i < begins_[state + 1]; i++)
            if (const Symbol next = top(members_[i]);
                next.kind == SymbolKind::token || next.kind == SymbolKind::other_token)
                visit(next);
    }

    // Once much is kept, forgets everything but one state. Returns the new number of that state,
    // and whether anything was forgotten, which invalidates all other numbers.
    std::pair<State, bool> tidy(State state);

private:
    struct Stack {
        // The top of the stack: an index of the grammar's symbols or, behind those, of `counts_`:
        // how often a repetition must or may still come.
        std::uint32_t symbol;
        std::uint32_t below;  // the rest of the stack
    };
    static constexpr std::uint32_t kEmpty = 0;  // the empty stack

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
    // Has for each repetition the symbol that stands for zero of it.
    std::vector<std::uint32_t> counts_;
    GrammarLimits limits_;
    GrammarEffort& effort_;
    // Has the first code point of each class; a set contains all code points of a class or none.
    std::vector<std::uint32_t> classes_;
    std::array<std::uint32_t, 128> ascii_classes_{};

    std::vector<Stack> stacks_;
    NumberMap stack_numbers_;
    std::vector<std::uint32_t> members_;  // has the stacks of all states
    std::vector<std::uint32_t> begins_;   // where the stacks of each state begin, then the end
    std::vector<State> same_hash_;        // has for each state the previous one with the same hash
    NumberMap state_numbers_;             // finds states by hash
    NumberMap transitions_;               // finds the next state by state and class

    std::vector<std::uint32_t> seen_;  // has for each stack the search that it was last seen in
    std::uint32_t search_ = 0;
    std::vector<std::uint32_t> todo_;
    std::vector<std::uint32_t> found_;
};

}  // namespace entropykv
