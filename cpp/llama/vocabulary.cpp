#include "llama/vocabulary.hpp"

#include <llama.h>

#include <string>
#include <vector>

namespace entropykv {

namespace {

std::string text_of(const llama_vocab* vocabulary, llama_token token) {
    std::string text(32, '\0');
    while (true) {
        const auto size = static_cast<std::int32_t>(text.size());
        const std::int32_t n = llama_token_to_piece(vocabulary, token, text.data(), size, 0, true);
        text.resize(static_cast<std::size_t>(n < 0 ? -n : n));
        if (n >= 0) return text;
    }
}

}  // namespace

std::shared_ptr<const TokenTrie> read_token_texts(const llama_vocab* vocabulary) {
    const std::int32_t n_tokens = llama_vocab_n_tokens(vocabulary);
    std::vector<std::string> texts;
    std::vector<bool> ends;
    for (llama_token token = 0; token < n_tokens; token++) {
        texts.push_back(text_of(vocabulary, token));
        ends.push_back(llama_vocab_is_eog(vocabulary, token));
    }
    return std::make_shared<const TokenTrie>(std::move(texts), std::move(ends));
}

}  // namespace entropykv
