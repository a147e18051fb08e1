// Tests which tokens grammars allow, and which grammars are too large. Texts that are not grammars,
// are cut anywhere or have changed bytes are refused, and nothing is read beyond their ends.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>

#include "grammar/grammar_matcher.hpp"
#include "grammar/grammar_parser.hpp"

using namespace entropykv;  // NOLINT: a test of all of it

namespace {

int passed = 0;
int failed = 0;

void check(bool ok, const char* what, int line) {
    ++(ok ? passed : failed);
    if (!ok) std::printf("%s:%d: %s\n", __FILE__, line, what);
}

#define CHECK(condition) check((condition), #condition, __LINE__)

const std::string kJson =
    "root ::= object\n"
    "value ::= object | array | string | number | (\"true\" | \"null\") ws\n"
    "object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n"
    "array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws # of values\n"
    "string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" [\"\\\\bfnrt])* \"\\\"\" ws\n"
    "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ws\n"
    "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";

std::shared_ptr<const TokenTrie> bytes_and_words() {
    std::vector<std::string> texts;
    for (int byte = 0; byte < 256; byte++) texts.emplace_back(1, static_cast<char>(byte));
    for (const char* word : {"{\"", "\": ", "true", "[[[[", "\xC3\xA9", "\xE2\x82", "", "aaaa"})
        texts.emplace_back(word);
    texts.emplace_back("<end>");
    std::vector<bool> ends(texts.size(), false);
    ends.back() = true;
    return std::make_shared<const TokenTrie>(texts, ends);
}

const std::shared_ptr<const TokenTrie> kTrie = bytes_and_words();

GrammarMatcher matcher_of(const std::string& text, const GrammarLimits& limits = {},
                          std::function<void()> poll = {}) {
    auto rules = std::make_shared<const GrammarRules>(
        parse_grammar(text, "root", limits, [](const std::string& name) {
            return name == "<word>" ? std::optional<std::uint32_t>(258) : std::nullopt;
        }));
    return {rules, kTrie, limits, std::move(poll)};
}

std::vector<TokenCandidate> candidates() {
    std::vector<TokenCandidate> all;
    for (std::size_t token = 0; token < kTrie->n_tokens(); token++)
        all.push_back({static_cast<std::int32_t>(token), 0.0f, 0.0f});
    return all;
}

std::set<std::int32_t> allowed(GrammarMatcher& matcher) {
    std::vector<TokenCandidate> all = candidates();
    matcher.apply(all.data(), all.size());
    std::set<std::int32_t> tokens;
    for (const TokenCandidate& each : all)
        if (each.logit == 0.0f) tokens.insert(each.token);
    return tokens;
}

void take(GrammarMatcher& matcher, const std::string& text) {
    for (const char byte : text) matcher.accept(static_cast<unsigned char>(byte));
}

template <typename Error>
bool throws(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error&) {
        return true;
    }
    return false;
}

void check_tokens() {
    GrammarMatcher json = matcher_of(kJson);
    CHECK((allowed(json) == std::set<std::int32_t>{'{', 256}));
    take(json, "{\"a\": ");
    CHECK((allowed(json) == std::set<std::int32_t>{'{', '[', '"', '-', '0', '1', '2',
                                                   '3', '4', '5', '6', '7', '8', '9',
                                                   't', 'n', 256, 257, 258, 259}));
    CHECK(!json.may_end());
    take(json, "7}");
    CHECK(json.may_end());
    CHECK(allowed(json).count(static_cast<std::int32_t>(kTrie->n_tokens() - 1)) == 1);
    GrammarMatcher named = matcher_of("root ::= <word> !<[97]> .");
    CHECK((allowed(named) == std::set<std::int32_t>{258}));
    named.accept(258);
    CHECK(allowed(named).count('a') == 0 && allowed(named).count('b') == 1);
    GrammarMatcher split = matcher_of("root ::= [\xC3\xA9\xE2\x82\xAC] \"x\"");
    CHECK((allowed(split) == std::set<std::int32_t>{0xC3, 0xE2, 260, 261}));
    split.accept(261);
    CHECK((allowed(split) == std::set<std::int32_t>{0xAC}));
    CHECK(throws<std::invalid_argument>([&] { split.accept('x'); }));
    CHECK(throws<std::invalid_argument>([&] { split.accept(-1); }));
}

void check_limits() {
    std::string bomb = "root ::= x0\n";
    for (int i = 0; i < 24; i++) {
        const std::string rule = "x" + std::to_string(i), next = "x" + std::to_string(i + 1);
        bomb += rule + " ::= " + next + " \"a\" | " + next + " \"b\"\n";
    }
    CHECK(throws<std::length_error>([&] { matcher_of(bomb + "x24 ::= \"z\""); }));
    for (const char* large : {"root ::= \"a\"{99999999999999999999}", "root ::= \"a\"{0,2000000}",
                              "root ::= ((\"a\"{1000} \"b\"){1000} \"c\"){3000000}"})
        CHECK(throws<std::invalid_argument>([&] { matcher_of(large); }));
    for (const char* endless : {"root ::= root \"a\" | \"b\"", "root ::= x\nx ::= y \"a\"\ny ::= x",
                                "root ::= \"a\"? root \"b\" | \"c\"", "root ::= x\nx ::= x"})
        CHECK(throws<std::invalid_argument>([&] { matcher_of(endless); }));
    GrammarMatcher harmless = matcher_of("root ::= (\"a\"? (\"b\"*)*)* \"c\"");
    take(harmless, "abbac");
    CHECK(harmless.may_end());
    int polls = 0;
    GrammarLimits patient;
    patient.most_work = std::numeric_limits<std::uint64_t>::max();
    patient.most_stacks = patient.most_kept = 10000000;
    CHECK(throws<std::domain_error>([&] {
        matcher_of(bomb + "x24 ::= \"z\"", patient, [&] {
            if (++polls == 3) throw std::domain_error("stopped");
        });
    }));
    const std::string deep(100000, '(');
    CHECK(throws<std::invalid_argument>([&] { matcher_of("root ::= " + deep); }));
    const std::string closed = deep.substr(0, 50000) + "\"a\"" + std::string(50000, ')');
    CHECK(!matcher_of("root ::= " + closed).may_end());
}

// A text of any length needs no more memory than the limit of what is kept.
void check_long_text() {
    GrammarLimits small;
    small.most_kept = 3000;
    GrammarMatcher nested = matcher_of("root ::= \"(\" root \")\" | [a-z]", small);
    for (int round = 0; round < 40; round++) {
        CHECK(allowed(nested).count('(') == 1);
        take(nested, std::string(10, '('));
    }
    take(nested, "x" + std::string(400, ')'));
    CHECK(nested.may_end());
    GrammarMatcher counted = matcher_of("root ::= (\"a\"{5,1000000} \"b\"){6,}", small);
    for (int round = 0; round < 60; round++) {
        CHECK(counted.may_end() == (round >= 6));
        take(counted, std::string(100, 'a') + "b");
        CHECK((allowed(counted).count('a') == 1));
    }
    GrammarMatcher flat = matcher_of("root ::= ([a-f] [0-9]{1,3})+", small);
    for (int round = 0; round < 5000; round++) take(flat, "a1b22c333");
    CHECK(flat.may_end());
}

void check_damaged_texts() {
    std::mt19937 random(7);
    const auto below = [&](std::size_t n) { return random() % n; };
    int n_read = 0;
    for (int round = 0; round < 3000; round++) {
        std::string text = kJson;
        if (below(2) == 0) text.resize(below(text.size()));
        for (std::size_t i = below(4); i > 0 && !text.empty(); i--)
            text[below(text.size())] =
                static_cast<char>(below(3) == 0 ? below(256) : kJson[below(60)]);
        try {
            GrammarMatcher matcher = matcher_of(text);
            for (int step = 0; step < 20; step++) {
                const std::set<std::int32_t> next = allowed(matcher);
                if (next.empty()) break;
                matcher.accept(*std::next(next.begin(), static_cast<long>(below(next.size()))));
            }
            n_read++;
        } catch (const std::invalid_argument&) {
        } catch (const std::length_error&) {
        }
    }
    CHECK(n_read > 100);
}

}  // namespace

int main() {
    check_tokens();
    check_limits();
    check_long_text();
    check_damaged_texts();
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
