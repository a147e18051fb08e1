#include "grammar/grammar_parser.hpp"

#include <utility>

#include "grammar/grammar_text.hpp"
#include "grammar/grammar_writer.hpp"

namespace entropykv {

namespace {

constexpr std::uint32_t kLastCodePoint = 0x10FFFF;
constexpr std::uint64_t kNoEnd = GrammarWriter::kNoEnd;

using Sequence = GrammarWriter::Sequence;

// Is a rule, or a group in a rule, whose end was not read yet.
struct OpenRule {
    std::uint32_t rule = 0;
    std::vector<Sequence> alternatives;
    Sequence sequence;
    std::size_t item = 0;  // where the latest item begins, which a repetition repeats
};

class Parser {
public:
    Parser(std::string_view text, const GrammarLimits& limits, const FindToken& find_token)
        : text_(text), find_token_(find_token), writer_(limits) {}

    GrammarRules parse(const std::string& root) {
        text_.skip_space(true);
        while (!text_.at_end()) parse_rule();
        return writer_.finish(root);
    }

private:
    void parse_rule() {
        const std::string name = text_.take_name();
        if (name.empty()) text_.fail("the name of a rule is expected");
        text_.skip_space(false);
        if (!text_.take("::=")) text_.fail("::= is expected after the name of a rule");
        text_.skip_space(true);
        open_.push_back(opened(writer_.rule_of(name)));
        while (parse_part()) {
        }
        if (open_.size() > 1) text_.fail("a group is not closed");
        if (!text_.at_end() && !text_.take_line_end())
            text_.fail("the end of the line is expected");
        close();
        text_.skip_space(true);
    }

    // Parses the next part of a rule; returns whether there was one.
    bool parse_part() {
        const char c = text_.peek();
        if (c == '"') {
            parse_literal();
        } else if (c == '[') {
            parse_set();
        } else if (c == '.') {
            text_.advance();
            begin_item();
            add(writer_.set_of({}, true));
        } else if (c == '<' || c == '!') {
            parse_token();
        } else if (is_name(c)) {
            begin_item();
            add({SymbolKind::rule, writer_.rule_of(text_.take_name())});
        } else if (c == '(') {
            text_.advance();
            text_.skip_space(true);
            open_.push_back(opened(writer_.part_of(open_.back().rule)));
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
            add(set_of({{c, c}}, false));
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
            writer_.count(1);
            ranges.push_back({first, last});
        }
        if (ranges.empty() && !inverted) text_.fail("[] has no characters");
        begin_item();
        add(set_of(std::move(ranges), inverted));
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

    // Replaces the latest item by `least` to `most` of it, or by any number of it.
    void repeat(std::uint64_t least, std::uint64_t most) {
        OpenRule& open = open_.back();
        if (open.item == open.sequence.size()) text_.fail("there is nothing before a repetition");
        Sequence item(open.sequence.begin() + static_cast<std::ptrdiff_t>(open.item),
                      open.sequence.end());
        open.sequence.resize(open.item);
        const Sequence parts = writer_.repeated(open.rule, std::move(item), least, most);
        open.sequence.insert(open.sequence.end(), parts.begin(), parts.end());
    }

    // The following functions build the rule that is being parsed.

    OpenRule opened(std::uint32_t rule) {
        OpenRule open;
        open.rule = rule;
        return open;
    }

    void begin_item() { open_.back().item = open_.back().sequence.size(); }

    void add(Symbol symbol) {
        writer_.count(1);
        open_.back().sequence.push_back(symbol);
    }

    Symbol set_of(std::vector<CharacterRange> ranges, bool inverted) {
        for (const CharacterRange& range : ranges)
            if (range.last > kLastCodePoint) text_.fail("there are no characters above U+10FFFF");
        return writer_.set_of(std::move(ranges), inverted);
    }

    void end_alternative() {
        OpenRule& open = open_.back();
        open.alternatives.push_back(std::move(open.sequence));
        open.sequence.clear();
        open.item = 0;
    }

    void close() {
        end_alternative();
        writer_.write(open_.back().rule, open_.back().alternatives);
        open_.pop_back();
    }

    GrammarText text_;
    const FindToken& find_token_;
    GrammarWriter writer_;
    std::vector<OpenRule> open_;
};

}  // namespace

GrammarRules parse_grammar(std::string_view text, const std::string& root,
                           const GrammarLimits& limits, const FindToken& find_token) {
    GrammarRules grammar = Parser(text, limits, find_token).parse(root);
    check_left_recursion(grammar);
    return grammar;
}

}  // namespace entropykv
