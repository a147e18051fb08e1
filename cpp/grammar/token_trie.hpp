// Holds the texts of a vocabulary's tokens as a sorted trie, so that a common prefix is checked
// once.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace entropykv {

class TokenTrie {
public:
    struct Node {
        std::uint32_t depth;  // is counted in bytes, from 1 on
        std::uint32_t next;   // the node behind all those that begin with this node's bytes
        std::uint32_t first_token;
        std::uint8_t byte;
    };

    // texts: of all tokens. ends: tells for each token whether it ends a text instead of being a
    // part of it.
    TokenTrie(std::vector<std::string> texts, std::vector<bool> ends);

    std::size_t n_tokens() const { return texts_.size(); }
    std::size_t size() const { return nodes_.size() - 1; }
    const Node& node(std::size_t i) const { return nodes_[i]; }
    // Returns the tokens whose bytes end at a node.
    const std::uint32_t* begin_tokens(std::size_t i) const {
        return tokens_.data() + nodes_[i].first_token;
    }
    const std::uint32_t* end_tokens(std::size_t i) const { return begin_tokens(i + 1); }
    std::size_t depth() const { return depth_; }

    std::string_view text(std::uint32_t token) const { return texts_[token]; }
    bool ends(std::uint32_t token) const { return ends_[token]; }
    // Tells whether a token has a text that a grammar could allow.
    bool has_text(std::uint32_t token) const {
        return !ends_[token] && !texts_[token].empty() && texts_[token][0] != '\0';
    }
    // Returns all tokens with a text.
    const std::vector<std::uint32_t>& tokens() const { return tokens_; }

private:
    std::vector<std::string> texts_;
    std::vector<bool> ends_;
    std::vector<std::uint32_t> tokens_;  // are sorted by text
    std::vector<Node> nodes_;            // are in the same order, with one more at the end
    std::size_t depth_ = 0;
};

}  // namespace entropykv
