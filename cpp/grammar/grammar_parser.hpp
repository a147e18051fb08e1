// Parses a grammar in llama.cpp's notation (GBNF).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "grammar/grammar_effort.hpp"
#include "grammar/grammar_rules.hpp"

namespace entropykv {

// Returns the token whose text is, for example, <think>; nothing if the text is not exactly one
// token.
using FindToken = std::function<std::optional<std::uint32_t>(const std::string& text)>;

// Returns the rules of a text. Throws std::invalid_argument with the line number if the text is not
// a grammar or is too large.
GrammarRules parse_grammar(std::string_view text, const std::string& root,
                           const GrammarLimits& limits, const FindToken& find_token);

}  // namespace entropykv
