// Reads the texts of a vocabulary's tokens.
#pragma once

#include <memory>

#include "grammar/token_trie.hpp"

struct llama_vocab;

namespace entropykv {

// The text of a control token is its name, for example <|im_end|>.
std::shared_ptr<const TokenTrie> read_token_texts(const llama_vocab* vocabulary);

}  // namespace entropykv
