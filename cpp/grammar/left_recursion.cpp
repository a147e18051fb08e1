// Finds rules that begin with themselves. No function is recursive, because a grammar can nest
// rules as deep as it has symbols.
#include <algorithm>
#include <stdexcept>

#include "grammar/grammar_rules.hpp"

namespace entropykv {

namespace {

struct FirstRule {
    std::uint32_t rule;
    bool followed;  // whether something else of the same alternative follows
};

// Returns which rules can match the empty text.
std::vector<bool> empty_rules(const GrammarRules& grammar) {
    struct Use {
        std::uint32_t rule;  // whose alternative this is
        std::uint32_t alternative;
    };
    std::vector<bool> empty(grammar.rules.size(), false);
    std::vector<std::uint32_t> missing(grammar.alternatives.size(), 0);
    std::vector<std::vector<Use>> uses(grammar.rules.size());
    std::vector<std::uint32_t> todo;
    const auto mark = [&](std::uint32_t rule) {
        if (!empty[rule]) todo.push_back(rule);
        empty[rule] = true;
    };
    for (std::uint32_t rule = 0; rule < grammar.rules.size(); rule++) {
        const std::uint32_t first = grammar.rules[rule].first;
        const std::uint32_t count = grammar.rules[rule].count;
        for (std::uint32_t each = first; each < first + count; each++) {
            std::uint32_t at = grammar.alternatives[each];
            for (; grammar.symbols[at].kind != SymbolKind::end; at++) {
                missing[each]++;
                if (grammar.symbols[at].kind == SymbolKind::rule)
                    uses[grammar.symbols[at].value].push_back({rule, each});
            }
            if (missing[each] == 0) mark(rule);
        }
    }
    while (!todo.empty()) {
        const std::uint32_t rule = todo.back();
        todo.pop_back();
        for (const Use& use : uses[rule])
            if (--missing[use.alternative] == 0) mark(use.rule);
    }
    return empty;
}

// Returns which rules each rule can begin with before it reads a character.
std::vector<std::vector<FirstRule>> beginnings(const GrammarRules& grammar) {
    const std::vector<bool> empty = empty_rules(grammar);
    std::vector<std::vector<FirstRule>> begins(grammar.rules.size());
    for (std::size_t rule = 0; rule < grammar.rules.size(); rule++) {
        const std::uint32_t first = grammar.rules[rule].first;
        const std::uint32_t count = grammar.rules[rule].count;
        for (std::uint32_t each = first; each < first + count; each++) {
            const Symbol* symbol = &grammar.symbols[grammar.alternatives[each]];
            for (; symbol->kind == SymbolKind::rule; symbol++) {
                begins[rule].push_back({symbol->value, symbol[1].kind != SymbolKind::end});
                if (!empty[symbol->value]) break;
            }
        }
    }
    return begins;
}

// Numbers the rules so that those which can begin with each other get the same number (Tarjan's
// strongly connected components).
class RuleCycles {
public:
    explicit RuleCycles(const std::vector<std::vector<FirstRule>>& begins)
        : begins_(begins), seen_(begins.size(), 0), low_(begins.size(), 0), of_(begins.size(), 0) {
        for (std::uint32_t rule = 0; rule < begins.size(); rule++)
            if (seen_[rule] == 0) walk(rule);
    }

    std::uint32_t of(std::uint32_t rule) const { return of_[rule]; }

private:
    struct Visit {
        std::uint32_t rule;
        std::size_t next = 0;
    };

    void walk(std::uint32_t start) {
        std::vector<Visit> path{enter(start)};
        while (!path.empty()) {
            Visit& visit = path.back();
            const std::uint32_t rule = visit.rule;
            if (visit.next < begins_[rule].size()) {
                const std::uint32_t other = begins_[rule][visit.next++].rule;
                if (seen_[other] == 0)
                    path.push_back(enter(other));
                else if (of_[other] == 0)
                    low_[rule] = std::min(low_[rule], seen_[other]);
                continue;
            }
            if (low_[rule] == seen_[rule]) close(rule);
            path.pop_back();
            if (!path.empty())
                low_[path.back().rule] = std::min(low_[path.back().rule], low_[rule]);
        }
    }

    Visit enter(std::uint32_t rule) {
        seen_[rule] = low_[rule] = ++n_seen_;
        open_.push_back(rule);
        return {rule};
    }

    void close(std::uint32_t rule) {
        n_circles_++;
        for (std::uint32_t last = open_.back();; last = open_.back()) {
            open_.pop_back();
            of_[last] = n_circles_;
            if (last == rule) return;
        }
    }

    const std::vector<std::vector<FirstRule>>& begins_;
    std::vector<std::uint32_t> seen_;  // order of the first visit; 0: not visited
    std::vector<std::uint32_t> low_;
    std::vector<std::uint32_t> of_;  // number of the component; 0: not closed yet
    std::vector<std::uint32_t> open_;
    std::uint32_t n_seen_ = 0;
    std::uint32_t n_circles_ = 0;
};

}  // namespace

void check_left_recursion(const GrammarRules& grammar) {
    const std::vector<std::vector<FirstRule>> begins = beginnings(grammar);
    const RuleCycles cycles(begins);
    for (std::uint32_t rule = 0; rule < begins.size(); rule++)
        for (const FirstRule& begin : begins[rule])
            if (begin.followed && cycles.of(begin.rule) == cycles.of(rule))
                throw std::invalid_argument(
                    "the rule " + grammar.name_of(rule) +
                    " begins with itself (left recursion); let it begin with a character");
}

}  // namespace entropykv
