#include "grammar/grammar_states.hpp"

#include <algorithm>
#include <stdexcept>

namespace entropykv {

namespace {

std::uint64_t pair_key(std::uint64_t a, std::uint64_t b) { return a << 32 | b; }

}  // namespace

GrammarStates::GrammarStates(const GrammarRules& grammar, const GrammarLimits& limits,
                             GrammarEffort& effort)
    : grammar_(grammar), limits_(limits), effort_(effort) {
    auto next = static_cast<std::uint32_t>(grammar.symbols.size());
    for (const GrammarRules::Repetition& repetition : grammar.repetitions) {
        counts_.push_back(next);
        next += repetition.most + 1;
    }
    find_classes();
    clear();
}

GrammarStates::State GrammarStates::start() {
    begin_search();
    const GrammarRules::Rule& root = grammar_.rules[grammar_.root];
    for (std::uint32_t each = root.first; each < root.first + root.count; each++) {
        const std::uint32_t begin = grammar_.alternatives[each];
        const bool empty = grammar_.symbols[begin].kind == SymbolKind::end;
        search(empty ? kEmpty : push(begin, kEmpty));
    }
    return number_of_found();
}

GrammarStates::State GrammarStates::after_character(State state, std::uint32_t code_point) {
    if (state == kDead) return kDead;
    const std::uint64_t key = pair_key(state, class_of(code_point));
    if (const State known = transitions_.at(key); known != NumberMap::kNone) return known;
    begin_search();
    effort_.spend(begins_[state + 1] - begins_[state]);
    for (std::uint32_t i = begins_[state]; i < begins_[state + 1]; i++) {
        const Symbol next = top(members_[i]);
        if (next.kind == SymbolKind::characters && grammar_.sets[next.value].has(code_point))
            search(past(members_[i]));
    }
    const State after = number_of_found();
    transitions_.at(key) = after;
    return after;
}

GrammarStates::State GrammarStates::after_token(State state, std::uint32_t token) {
    begin_search();
    for (std::uint32_t i = begins_[state]; i < begins_[state + 1]; i++) {
        const Symbol next = top(members_[i]);
        if ((next.kind == SymbolKind::token && next.value == token) ||
            (next.kind == SymbolKind::other_token && next.value != token))
            search(past(members_[i]));
    }
    return number_of_found();
}

GrammarStates::State GrammarStates::either(State a, State b) {
    if (a == kDead || b == kDead) return a == kDead ? b : a;
    begin_search();
    for (const State state : {a, b})
        for (std::uint32_t i = begins_[state]; i < begins_[state + 1]; i++) search(members_[i]);
    return number_of_found();
}

bool GrammarStates::may_end(State state) const {
    // Stacks are sorted, so the empty stack can only be the first.
    return state != kDead && members_[begins_[state]] == kEmpty;
}

bool GrammarStates::may_follow(State state, std::uint32_t first, std::uint32_t last) {
    effort_.spend(begins_[state + 1] - begins_[state]);
    for (std::uint32_t i = begins_[state]; i < begins_[state + 1]; i++)
        if (const Symbol next = top(members_[i]);
            next.kind == SymbolKind::characters && grammar_.sets[next.value].has_any(first, last))
            return true;
    return false;
}

std::pair<GrammarStates::State, bool> GrammarStates::tidy(State state) {
    if (2 * (stacks_.size() + members_.size() + transitions_.size()) < limits_.most_kept)
        return {state, false};
    const std::vector<Stack> old = stacks_;
    const std::vector<std::uint32_t> kept(members_.begin() + begins_[state],
                                          members_.begin() + begins_[state + 1]);
    clear();
    begin_search();
    std::vector<std::uint32_t> path;
    for (const std::uint32_t stack : kept) {
        path.clear();
        for (std::uint32_t at = stack; at != kEmpty; at = old[at].below)
            path.push_back(old[at].symbol);
        std::uint32_t copy = kEmpty;
        for (auto symbol = path.rbegin(); symbol != path.rend(); ++symbol)
            copy = push(*symbol, copy);
        search(copy);
    }
    return {number_of_found(), true};
}

Symbol GrammarStates::top(std::uint32_t stack) const {
    return stack == kEmpty ? Symbol{} : grammar_.symbols[stacks_[stack].symbol];
}

bool GrammarStates::is_count(std::uint32_t stack) const {
    return stacks_[stack].symbol >= grammar_.symbols.size();
}

std::uint32_t GrammarStates::push_count(std::uint32_t repetition, std::uint32_t n_times,
                                        std::uint32_t below) {
    const bool over = n_times == 0 && !grammar_.repetitions[repetition].endless;
    return over ? below : push(counts_[repetition] + n_times, below);
}

// Continues with one more repetition, or with what follows if there were enough.
void GrammarStates::search_count(std::uint32_t stack) {
    const auto [symbol, below] = stacks_[stack];
    const auto after = std::upper_bound(counts_.begin(), counts_.end(), symbol);
    const auto number = static_cast<std::uint32_t>(after - counts_.begin() - 1);
    const GrammarRules::Repetition& repetition = grammar_.repetitions[number];
    const std::uint32_t n_times = symbol - counts_[number];
    if (n_times <= repetition.most - repetition.least) todo_.push_back(below);
    const std::uint32_t rest = push_count(number, n_times > 0 ? n_times - 1 : 0, below);
    todo_.push_back(push(repetition.part, rest));
}

std::uint32_t GrammarStates::push(std::uint32_t symbol, std::uint32_t below) {
    std::uint32_t& number = stack_numbers_.at(pair_key(symbol, below));
    if (number == NumberMap::kNone) {
        number = static_cast<std::uint32_t>(stacks_.size());
        stacks_.push_back({symbol, below});
        seen_.push_back(0);
        check_kept();
    }
    return number;
}

// Returns the stack after its top was read. Ends of alternatives are removed at once, so that right
// recursion does not make the stack grow.
std::uint32_t GrammarStates::past(std::uint32_t stack) {
    const auto [symbol, below] = stacks_[stack];
    const bool last = grammar_.symbols[symbol + 1].kind == SymbolKind::end;
    return last ? below : push(symbol + 1, below);
}

void GrammarStates::begin_search() {
    search_++;
    found_.clear();
}

// Adds to `found_` all stacks that this one can expand to, each with something to read on top.
void GrammarStates::search(std::uint32_t stack) {
    todo_.assign(1, stack);
    while (!todo_.empty()) {
        const std::uint32_t each = todo_.back();
        todo_.pop_back();
        effort_.spend(1);
        if (seen_[each] == search_) continue;
        seen_[each] = search_;
        if (is_count(each)) {
            search_count(each);
            continue;
        }
        const Symbol next = top(each);
        if (next.kind != SymbolKind::rule) {
            found_.push_back(each);
            if (found_.size() > limits_.most_stacks)
                throw std::length_error(
                    "it is too ambiguous: more than " + std::to_string(limits_.most_stacks) +
                    " ways to continue at one place; let alternatives begin with "
                    "different characters");
            continue;
        }
        const std::uint32_t rest = past(each);
        const GrammarRules::Rule& rule = grammar_.rules[next.value];
        if (rule.counted != GrammarRules::kNotCounted) {
            const std::uint32_t most = grammar_.repetitions[rule.counted].most;
            todo_.push_back(push_count(rule.counted, most, rest));
            continue;
        }
        for (std::uint32_t i = rule.first; i < rule.first + rule.count; i++) {
            const std::uint32_t begin = grammar_.alternatives[i];
            const bool empty = grammar_.symbols[begin].kind == SymbolKind::end;
            todo_.push_back(empty ? rest : push(begin, rest));
        }
    }
}

GrammarStates::State GrammarStates::number_of_found() {
    if (found_.empty()) return kDead;
    std::sort(found_.begin(), found_.end());
    std::uint64_t hash = found_.size();
    for (const std::uint32_t stack : found_) hash = (hash ^ stack) * 0x100000001B3U;
    std::uint32_t& newest = state_numbers_.at(hash >> 1);
    for (State state = newest; state != NumberMap::kNone; state = same_hash_[state])
        if (std::equal(found_.begin(), found_.end(), members_.begin() + begins_[state],
                       members_.begin() + begins_[state + 1]))
            return state;
    const auto state = static_cast<State>(begins_.size() - 1);
    members_.insert(members_.end(), found_.begin(), found_.end());
    begins_.push_back(static_cast<std::uint32_t>(members_.size()));
    same_hash_.push_back(newest);
    newest = state;
    check_kept();
    return state;
}

std::uint64_t GrammarStates::class_of(std::uint32_t code_point) const {
    if (code_point < ascii_classes_.size()) return ascii_classes_[code_point];
    const auto after = std::upper_bound(classes_.begin(), classes_.end(), code_point);
    return static_cast<std::uint64_t>(after - classes_.begin());
}

void GrammarStates::find_classes() {
    for (const CharacterSet& set : grammar_.sets)
        for (const CharacterRange& range : set.ranges()) {
            classes_.push_back(range.first);
            classes_.push_back(range.last + 1);
        }
    std::sort(classes_.begin(), classes_.end());
    classes_.erase(std::unique(classes_.begin(), classes_.end()), classes_.end());
    for (std::uint32_t c = 0; c < ascii_classes_.size(); c++)
        ascii_classes_[c] = static_cast<std::uint32_t>(
            std::upper_bound(classes_.begin(), classes_.end(), c) - classes_.begin());
}

void GrammarStates::check_kept() const {
    if (stacks_.size() + members_.size() + transitions_.size() > limits_.most_kept)
        throw std::length_error(
            "it is too ambiguous: what may come next takes too much memory; let alternatives begin "
            "with different characters");
}

void GrammarStates::clear() {
    stacks_.assign(1, {0, kEmpty});
    seen_.assign(1, 0);
    members_.clear();
    begins_.assign(2, 0);  // the dead state has no stacks
    same_hash_.assign(1, NumberMap::kNone);
    stack_numbers_.clear();
    state_numbers_.clear();
    transitions_.clear();
}

}  // namespace entropykv
