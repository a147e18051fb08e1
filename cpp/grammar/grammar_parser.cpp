#include "grammar/grammar_parser.hpp"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "grammar/grammar_text.hpp"

namespace entropykv {

namespace {

constexpr std::uint32_t kLastCodePoint = 0x10FFFF;
constexpr std::uint64_t kNoEnd = UINT64_MAX;

using Sequence = std::vector<Symbol>;

// A rule, or a group in one, whose end was not read yet.
struct Open {
    std::uint32_t rule = 0;
    std::vector<Sequence> alternatives;
    Sequence sequence;
    std::size_t item = 0;  // where the part begins that a repetition would repeat
};

class Parser {
public:
    Parser(std::string_view text, std::size_t most_symbols, const FindToken& find_token)
        : text_(text), most_symbols_(most_symbols), find_token_(find_token) {}

    GrammarRules parse(const std::string& root) {
        text_.skip_space(true);
        while (!text_.at_end()) parse_rule();
        const auto found = numbers_.find(root);
        if (found == numbers_.end()) throw std::invalid_argument("it has no rule named " + root);
        for (std::size_t rule = 0; rule < grammar_.rules.size(); rule++)
            if (grammar_.rules[rule].count == 0)
                throw std::invalid_argument("the rule " + grammar_.name_of(rule) +
                                            " is named, but not there");
        grammar_.root = found->second;
        return std::move(grammar_);
    }

private:
    void parse_rule() {
        const std::string name = text_.take_name();
        if (name.empty()) text_.fail("the name of a rule is expected");
        text_.skip_space(false);
        if (!text_.take("::=")) text_.fail("::= is expected after the name of a rule");
        text_.skip_space(true);
        open_.push_back(opened(number_of(name)));
        while (parse_part()) {
        }
        if (open_.size() > 1) text_.fail("a group is not closed");
        if (!text_.at_end() && !text_.take_line_end())
            text_.fail("the end of the line is expected");
        close();
        text_.skip_space(true);
    }

    // Parses what is next within a rule; returns whether anything was.
    bool parse_part() {
        const char c = text_.peek();
        if (c == '"') {
            parse_literal();
        } else if (c == '[') {
            parse_set();
        } else if (c == '.') {
            text_.advance();
            add_set(CharacterSet({}, true));
        } else if (c == '<' || c == '!') {
            parse_token();
        } else if (is_name(c)) {
            begin_item();
            add({SymbolKind::rule, number_of(text_.take_name())});
        } else if (c == '(') {
            text_.advance();
            text_.skip_space(true);
            open_.push_back(opened(new_rule()));
            return true;
        } else if (c == ')' && open_.size() > 1) {
            text_.advance();
            const std::uint32_t rule = open_.back().rule;
            close();
            begin_item();
            add({SymbolKind::rule, rule});
        } else if (c == '|') {
            text_.advance();
            text_.skip_space(true);
            end_alternative();
            return true;
        } else if (c == '*' || c == '+' || c == '?' || c == '{') {
            parse_repetition();
        } else {
            return false;
        }
        text_.skip_space(open_.size() > 1);
        return true;
    }

    void parse_literal() {
        text_.advance();
        begin_item();
        while (!text_.take("\"")) {
            const std::uint32_t c = text_.take_character();
            add({SymbolKind::characters, set_of({{c, c}}, false)});
        }
    }

    void parse_set() {
        text_.advance();
        const bool inverted = text_.take("^");
        std::vector<CharacterRange> ranges;
        while (!text_.take("]")) {
            const std::uint32_t first = text_.take_character();
            std::uint32_t last = first;
            if (text_.peek() == '-' && text_.peek(1) != ']') {
                text_.advance();
                last = text_.take_character();
            }
            count(1);
            ranges.push_back({first, last});
        }
        if (ranges.empty() && !inverted) text_.fail("[] has no characters");
        begin_item();
        add({SymbolKind::characters, set_of(std::move(ranges), inverted)});
    }

    void parse_token() {
        const bool other = text_.take("!");
        const SymbolKind kind = other ? SymbolKind::other_token : SymbolKind::token;
        if (text_.peek() != '<') text_.fail("a token such as <think> or <[13]> is expected");
        begin_item();
        if (text_.take("<[")) {
            const std::uint64_t token = text_.take_number();
            if (!text_.take("]>") || token > INT32_MAX) text_.fail("a token is written as <[13]>");
            add({kind, static_cast<std::uint32_t>(token)});
            return;
        }
        const std::string name = text_.take_through('>');
        const std::optional<std::uint32_t> token = find_token_(name);
        if (!token) text_.fail(name + " is not one token of the vocabulary");
        add({kind, *token});
    }

    void parse_repetition() {
        if (text_.take("*")) return repeat(0, kNoEnd);
        if (text_.take("+")) return repeat(1, kNoEnd);
        if (text_.take("?")) return repeat(0, 1);
        const bool nested = open_.size() > 1;
        text_.advance();
        text_.skip_space(nested);
        const std::uint64_t least = text_.take_number();
        std::uint64_t most = least;
        text_.skip_space(nested);
        if (text_.take(",")) {
            text_.skip_space(nested);
            most = is_digit(text_.peek()) ? text_.take_number() : kNoEnd;
            text_.skip_space(nested);
        }
        if (!text_.take("}")) text_.fail("a repetition is written as {2}, {2,} or {2,5}");
        if (most < least) text_.fail("a repetition's second number is below its first");
        repeat(least, most);
    }

    // Replaces the latest item by `least` of it, and then up to `most`, or any number of it.
    void repeat(std::uint64_t least, std::uint64_t most) {
        Open& open = open_.back();
        if (open.item == open.sequence.size()) text_.fail("there is nothing before a repetition");
        Sequence item(open.sequence.begin() + static_cast<std::ptrdiff_t>(open.item),
                      open.sequence.end());
        open.sequence.resize(open.item);
        const Symbol part =
            item.size() == 1 ? item[0] : Symbol{SymbolKind::rule, write_rule({std::move(item)})};
        count(least);
        open.sequence.insert(open.sequence.end(), static_cast<std::size_t>(least), part);
        if (most == kNoEnd) {
            const std::uint32_t again = new_rule();
            write(again, {Sequence{part, {SymbolKind::rule, again}}, Sequence{}});
            open.sequence.push_back({SymbolKind::rule, again});
        } else if (most > least) {
            count(4 * std::min<std::uint64_t>(most - least, most_symbols_));  // before any is made
            std::uint32_t fewer = write_rule({Sequence{part}, Sequence{}});
            for (std::uint64_t i = least + 1; i < most; i++)
                fewer = write_rule({Sequence{part, {SymbolKind::rule, fewer}}, Sequence{}});
            open.sequence.push_back({SymbolKind::rule, fewer});
        }
    }

    // --- what is being written -------------------------------------------------------------------

    Open opened(std::uint32_t rule) {
        Open open;
        open.rule = rule;
        return open;
    }

    void begin_item() { open_.back().item = open_.back().sequence.size(); }

    void add(Symbol symbol) {
        count(1);
        open_.back().sequence.push_back(symbol);
    }

    void add_set(CharacterSet set) {
        begin_item();
        add({SymbolKind::characters, number_of(std::move(set))});
    }

    void end_alternative() {
        Open& open = open_.back();
        open.alternatives.push_back(std::move(open.sequence));
        open.sequence.clear();
        open.item = 0;
    }

    void close() {
        end_alternative();
        const Open open = std::move(open_.back());
        open_.pop_back();
        write(open.rule, open.alternatives);
    }

    std::uint32_t write_rule(const std::vector<Sequence>& alternatives) {
        const std::uint32_t rule = new_rule();
        write(rule, alternatives);
        return rule;
    }

    void write(std::uint32_t rule, const std::vector<Sequence>& alternatives) {
        grammar_.rules[rule].first = static_cast<std::uint32_t>(grammar_.alternatives.size());
        grammar_.rules[rule].count = static_cast<std::uint32_t>(alternatives.size());
        count(alternatives.size());
        for (const Sequence& each : alternatives) {
            grammar_.alternatives.push_back(static_cast<std::uint32_t>(grammar_.symbols.size()));
            grammar_.symbols.insert(grammar_.symbols.end(), each.begin(), each.end());
            grammar_.symbols.push_back({});
        }
    }

    // Adds a rule; without a name it is a part of the one that is read.
    std::uint32_t new_rule(const std::string& name = {}) {
        const auto rule = static_cast<std::uint32_t>(grammar_.rules.size());
        grammar_.names.push_back(name);
        grammar_.rules.emplace_back();
        grammar_.rules.back().part_of = name.empty() ? open_.front().rule : rule;
        return rule;
    }

    std::uint32_t number_of(const std::string& name) {
        const auto found = numbers_.find(name);
        if (found != numbers_.end()) return found->second;
        count(1);
        return numbers_.emplace(name, new_rule(name)).first->second;
    }

    std::uint32_t number_of(CharacterSet set) {
        grammar_.sets.push_back(std::move(set));
        return static_cast<std::uint32_t>(grammar_.sets.size() - 1);
    }

    // The set of one character is there once.
    std::uint32_t set_of(std::vector<CharacterRange> ranges, bool inverted) {
        for (const CharacterRange& range : ranges)
            if (range.last > kLastCodePoint) text_.fail("there are no characters above U+10FFFF");
        const bool single = !inverted && ranges.size() == 1 && ranges[0].first == ranges[0].last;
        if (!single) return number_of(CharacterSet(std::move(ranges), inverted));
        const auto [found, added] = singles_.emplace(ranges[0].first, 0);
        if (added) found->second = number_of(CharacterSet(std::move(ranges), false));
        return found->second;
    }

    void count(std::uint64_t n_symbols) {
        n_symbols_ += n_symbols;
        if (n_symbols_ > most_symbols_)
            text_.fail("it is too large: more than " + std::to_string(most_symbols_) +
                       " symbols once its repetitions are written out; repeat less");
    }

    GrammarText text_;
    std::uint64_t most_symbols_;
    const FindToken& find_token_;
    GrammarRules grammar_;
    std::vector<Open> open_;
    std::unordered_map<std::string, std::uint32_t> numbers_;
    std::unordered_map<std::uint32_t, std::uint32_t> singles_;
    std::uint64_t n_symbols_ = 0;
};

}  // namespace

GrammarRules parse_grammar(std::string_view text, const std::string& root, std::size_t most_symbols,
                           const FindToken& find_token) {
    GrammarRules grammar = Parser(text, most_symbols, find_token).parse(root);
    check_left_recursion(grammar);
    return grammar;
}

}  // namespace entropykv
