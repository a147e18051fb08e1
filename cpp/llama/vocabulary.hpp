// Reads the texts of a vocabulary's tokens.
#pragma once

#include <memory>

#include "grammar/token_trie.hpp"

struct llama_vocab;

namespace entropykv {

// Those of control tokens such as <|im_end|> are their names.
std::shared_ptr<const TokenTrie> read_token_texts(const llama_vocab* vocabulary);

}  // namespace entropykv
