#include "grammar/grammar_matcher.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace entropykv {

namespace {

constexpr std::size_t kMostAnswers = 32;
constexpr std::uint32_t kLastCodePoint = 0x10FFFF;

// Tells whether a byte may follow the first one of a UTF-8 character. Characters must not be longer
// than necessary, surrogates, or beyond the last code point.
bool is_second_byte(std::uint32_t bits, std::uint32_t n_missing, std::uint8_t byte) {
    if (n_missing == 2 && bits == 0x0) return byte >= 0xA0;
    if (n_missing == 2 && bits == 0xD) return byte < 0xA0;
    if (n_missing == 3 && bits == 0x0) return byte >= 0x90;
    if (n_missing == 3 && bits == 0x4) return byte < 0x90;
    return true;
}

// Returns the smallest code point that takes n_bytes bytes.
std::uint32_t first_of(std::uint32_t n_bytes) { return n_bytes == 4 ? 0x10000 : 0x800; }

}  // namespace

GrammarMatcher::GrammarMatcher(std::shared_ptr<const GrammarRules> grammar,
                               std::shared_ptr<const TokenTrie> trie, const GrammarLimits& limits,
                               std::function<void()> poll)
    : grammar_(std::move(grammar)),
      trie_(std::move(trie)),
      effort_(limits.most_work, std::move(poll)),
      states_(*grammar_, limits, effort_),
      path_(trie_->depth() + 1) {
    position_.state = states_.start();
    if (position_.state == GrammarStates::kDead)
        throw std::invalid_argument("no text fits it: its rules only name each other");
}

void GrammarMatcher::apply(TokenCandidate* candidates, std::size_t n_candidates) {
    const Allowed& allowed = this->allowed();
    const bool ends = may_end();
    for (std::size_t i = 0; i < n_candidates; i++) {
        const auto token = static_cast<std::uint32_t>(candidates[i].token);
        const bool known = token < trie_->n_tokens();
        if (!known || !(trie_->ends(token) ? ends : allowed[token]))
            candidates[i].logit = -std::numeric_limits<float>::infinity();
    }
}

void GrammarMatcher::accept(std::int32_t token) {
    const auto number = static_cast<std::uint32_t>(token);
    if (number >= trie_->n_tokens()) throw std::invalid_argument("a token that is not there");
    if (trie_->ends(number)) {
        if (!may_end()) throw std::invalid_argument("the text may not end here");
        return;
    }
    effort_.begin();
    Position after = position_;
    for (const char byte : trie_->text(number))
        after = after_byte(after, static_cast<std::uint8_t>(byte));
    if (!lives(after)) after = {};
    if (position_.is_whole() && trie_->has_text(number) && after.is_whole())
        after.state = states_.either(after.state, states_.after_token(position_.state, number));
    if (!trie_->has_text(number) || after.state == GrammarStates::kDead)
        throw std::invalid_argument("a token that the grammar does not allow");
    bool forgot = false;
    std::tie(after.state, forgot) = states_.tidy(after.state);
    if (forgot) answers_.clear();
    position_ = after;
}

const GrammarMatcher::Allowed& GrammarMatcher::allowed() {
    const std::tuple key(position_.state, position_.bits, position_.n_missing);
    const auto known = answers_.find(key);
    if (known != answers_.end()) return known->second;
    effort_.begin();
    Allowed allowed(trie_->n_tokens(), false);
    walk(allowed);
    if (position_.is_whole()) add_tokens(allowed);
    if (answers_.size() >= kMostAnswers) answers_.clear();
    return answers_.emplace(key, std::move(allowed)).first->second;
}

// Visits the texts of all tokens. If a prefix is refused, all texts that begin with it are skipped.
void GrammarMatcher::walk(Allowed& allowed) {
    path_[0] = position_;
    for (std::size_t i = 0; i < trie_->size();) {
        effort_.spend(1);
        const TokenTrie::Node& node = trie_->node(i);
        const Position at = path_[node.depth] = after_byte(path_[node.depth - 1], node.byte);
        if (!lives(at)) {
            i = node.next;
            continue;
        }
        for (auto token = trie_->begin_tokens(i); token != trie_->end_tokens(i); ++token)
            allowed[*token] = true;
        i++;
    }
}

// Adds the tokens that the grammar names.
void GrammarMatcher::add_tokens(Allowed& allowed) {
    states_.each_token(position_.state, [&](Symbol named) {
        const bool other = named.kind == SymbolKind::other_token;
        if (other) {
            effort_.spend(trie_->tokens().size());
            for (const std::uint32_t token : trie_->tokens())
                if (token != named.value) allowed[token] = true;
        } else if (named.value < trie_->n_tokens() && trie_->has_text(named.value)) {
            allowed[named.value] = true;
        }
    });
}

GrammarMatcher::Position GrammarMatcher::after_byte(Position position, std::uint8_t byte) {
    if (position.state == GrammarStates::kDead) return {};
    if (position.n_missing > 0) {
        if ((byte & 0xC0) != 0x80 || !is_second_byte(position.bits, position.n_missing, byte))
            return {};
        position.bits = position.bits << 6 | (byte & 0x3FU);
        position.n_missing--;
    } else if (byte < 0x80) {
        position.bits = byte;
    } else {
        if (byte < 0xC2 || byte > 0xF4) return {};
        position.n_missing = byte >= 0xF0 ? 3 : byte >= 0xE0 ? 2 : 1;
        position.bits = byte & (0x3FU >> position.n_missing);
    }
    if (position.n_missing > 0) return position;
    return {states_.after_character(position.state, position.bits), 0, 0};
}

// Tells whether a text can continue from a position, which may be inside a character.
bool GrammarMatcher::lives(const Position& position) {
    if (position.state == GrammarStates::kDead || position.is_whole())
        return position.state != GrammarStates::kDead;
    const std::uint32_t first = position.bits << (6 * position.n_missing);
    const std::uint32_t last = first | ((1U << (6 * position.n_missing)) - 1);
    return states_.may_follow(position.state, first == 0 ? first_of(position.n_missing + 1) : first,
                              std::min(last, kLastCodePoint));
}

}  // namespace entropykv
