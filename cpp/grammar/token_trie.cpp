#include "grammar/token_trie.hpp"

#include <algorithm>
#include <stdexcept>

namespace entropykv {

TokenTrie::TokenTrie(std::vector<std::string> texts, std::vector<bool> ends)
    : texts_(std::move(texts)), ends_(std::move(ends)) {
    if (ends_.size() != texts_.size())
        throw std::invalid_argument("texts and ends must be those of the same tokens");
    for (std::uint32_t token = 0; token < texts_.size(); token++)
        if (has_text(token)) tokens_.push_back(token);
    std::stable_sort(tokens_.begin(), tokens_.end(),
                     [this](std::uint32_t a, std::uint32_t b) { return texts_[a] < texts_[b]; });
    std::vector<std::uint32_t> path;  // nodes of the previous text
    std::string_view before;
    const auto leave = [&](std::size_t depth) {
        for (; path.size() > depth; path.pop_back())
            nodes_[path.back()].next = static_cast<std::uint32_t>(nodes_.size());
    };
    for (std::uint32_t i = 0; i < tokens_.size(); i++) {
        const std::string_view text = texts_[tokens_[i]];
        std::size_t shared = 0;
        while (shared < std::min(text.size(), before.size()) && text[shared] == before[shared])
            shared++;
        leave(shared);
        for (std::size_t at = shared; at < text.size(); at++) {
            path.push_back(static_cast<std::uint32_t>(nodes_.size()));
            nodes_.push_back(
                {static_cast<std::uint32_t>(at + 1), 0, i, static_cast<std::uint8_t>(text[at])});
        }
        depth_ = std::max(depth_, text.size());
        before = text;
    }
    leave(0);
    nodes_.push_back({0, 0, static_cast<std::uint32_t>(tokens_.size()), 0});
}

}  // namespace entropykv
