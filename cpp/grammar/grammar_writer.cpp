#include "grammar/grammar_writer.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace entropykv {

namespace {

// Items that are repeated more often are counted instead of written out.
constexpr std::uint64_t kMostWrittenOut = 4;
constexpr std::uint64_t kMostRepeats = 1U << 30;  // limit of all repetitions together

}  // namespace

void GrammarWriter::count(std::uint64_t n_symbols) {
    n_symbols_ += n_symbols;
    if (n_symbols_ > limits_.most_symbols)
        throw std::invalid_argument("it is too large: more than " +
                                    std::to_string(limits_.most_symbols) +
                                    " symbols; leave some of its rules out");
}

std::uint32_t GrammarWriter::rule_of(const std::string& name) {
    const auto found = names_.find(name);
    if (found != names_.end()) return found->second;
    count(1);
    return names_.emplace(name, add_rule(name)).first->second;
}

std::uint32_t GrammarWriter::part_of(std::uint32_t rule) {
    const std::uint32_t part = add_rule({});
    grammar_.rules[part].part_of = grammar_.rules[rule].part_of;
    return part;
}

void GrammarWriter::write(std::uint32_t rule, const std::vector<Sequence>& alternatives) {
    grammar_.rules[rule].first = static_cast<std::uint32_t>(grammar_.alternatives.size());
    grammar_.rules[rule].count = static_cast<std::uint32_t>(alternatives.size());
    count(alternatives.size());
    for (const Sequence& each : alternatives) {
        grammar_.alternatives.push_back(static_cast<std::uint32_t>(grammar_.symbols.size()));
        grammar_.symbols.insert(grammar_.symbols.end(), each.begin(), each.end());
        grammar_.symbols.push_back({});
    }
}

GrammarWriter::Sequence GrammarWriter::repeated(std::uint32_t rule, Sequence item,
                                                std::uint64_t least, std::uint64_t most) {
    const Symbol part =
        item.size() == 1 ? item[0] : Symbol{SymbolKind::rule, write_part(rule, {item})};
    if (std::max(least, most == kNoEnd ? 0 : most) > kMostWrittenOut)
        return {counted(rule, part, least, most)};
    Sequence sequence(static_cast<std::size_t>(least), part);
    count(least);
    if (most == kNoEnd) {
        const std::uint32_t again = part_of(rule);
        write(again, {Sequence{part, {SymbolKind::rule, again}}, Sequence{}});
        sequence.push_back({SymbolKind::rule, again});
    } else if (most > least) {
        std::uint32_t fewer = write_part(rule, {Sequence{part}, Sequence{}});
        for (std::uint64_t i = least + 1; i < most; i++)
            fewer = write_part(rule, {Sequence{part, {SymbolKind::rule, fewer}}, Sequence{}});
        sequence.push_back({SymbolKind::rule, fewer});
    }
    return sequence;
}

Symbol GrammarWriter::set_of(std::vector<CharacterRange> ranges, bool inverted) {
    const bool single = !inverted && ranges.size() == 1 && ranges[0].first == ranges[0].last;
    const auto next = static_cast<std::uint32_t>(grammar_.sets.size());
    if (single) {
        const auto [found, added] = singles_.emplace(ranges[0].first, next);
        if (!added) return {SymbolKind::characters, found->second};
    }
    grammar_.sets.emplace_back(std::move(ranges), inverted);
    return {SymbolKind::characters, next};
}

GrammarRules GrammarWriter::finish(const std::string& root) {
    const auto found = names_.find(root);
    if (found == names_.end()) throw std::invalid_argument("it has no rule named " + root);
    for (std::size_t rule = 0; rule < grammar_.rules.size(); rule++)
        if (grammar_.rules[rule].count == 0)
            throw std::invalid_argument("the rule " + grammar_.name_of(rule) +
                                        " is named, but not there");
    grammar_.root = found->second;
    return std::move(grammar_);
}

std::uint32_t GrammarWriter::add_rule(const std::string& name) {
    const auto rule = static_cast<std::uint32_t>(grammar_.rules.size());
    grammar_.names.push_back(name);
    grammar_.rules.emplace_back();
    grammar_.rules.back().part_of = rule;
    return rule;
}

std::uint32_t GrammarWriter::write_part(std::uint32_t rule,
                                        const std::vector<Sequence>& alternatives) {
    const std::uint32_t part = part_of(rule);
    write(part, alternatives);
    return part;
}

// Adds a rule that counts repetitions. Its alternatives only say what it can begin with.
Symbol GrammarWriter::counted(std::uint32_t rule, Symbol part, std::uint64_t least,
                              std::uint64_t most) {
    const bool endless = most == kNoEnd;
    const std::uint64_t times = endless ? least : most;
    n_repeats_ += times + 1;
    if (times > limits_.most_repeats || n_repeats_ > kMostRepeats)
        throw std::invalid_argument("it repeats something more than " +
                                    std::to_string(limits_.most_repeats) + " times; repeat less");
    std::vector<Sequence> alternatives{{part, part}};
    if (least == 0) alternatives.emplace_back();
    const std::uint32_t written = write_part(rule, alternatives);
    grammar_.rules[written].counted = static_cast<std::uint32_t>(grammar_.repetitions.size());
    const std::uint32_t begin = grammar_.alternatives[grammar_.rules[written].first];
    grammar_.repetitions.push_back(
        {begin + 1, static_cast<std::uint32_t>(least), static_cast<std::uint32_t>(times), endless});
    return {SymbolKind::rule, written};
}

}  // namespace entropykv
