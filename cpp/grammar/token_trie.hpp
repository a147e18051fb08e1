// The texts of a vocabulary's tokens, in order, so that what they begin with is looked at once.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace entropykv {

class TokenTrie {
public:
    struct Node {
        std::uint32_t depth;  // in bytes, from 1 on
        std::uint32_t next;   // the node after all those that begin with this one's bytes
        std::uint32_t first_token;
        std::uint8_t byte;
    };

    // `texts`: of all tokens; `ends`: of each, whether it ends a text, and is no part of it.
    TokenTrie(std::vector<std::string> texts, std::vector<bool> ends);

    std::size_t n_tokens() const { return texts_.size(); }
    std::size_t size() const { return nodes_.size() - 1; }
    const Node& node(std::size_t i) const { return nodes_[i]; }
    // The tokens whose bytes end with a node.
    const std::uint32_t* begin_tokens(std::size_t i) const {
        return tokens_.data() + nodes_[i].first_token;
    }
    const std::uint32_t* end_tokens(std::size_t i) const { return begin_tokens(i + 1); }
    std::size_t depth() const { return depth_; }

    std::string_view text(std::uint32_t token) const { return texts_[token]; }
    bool ends(std::uint32_t token) const { return ends_[token]; }
    // Whether a token has a text that a grammar can allow.
    bool has_text(std::uint32_t token) const {
        return !ends_[token] && !texts_[token].empty() && texts_[token][0] != '\0';
    }
    // All tokens with a text.
    const std::vector<std::uint32_t>& tokens() const { return tokens_; }

private:
    std::vector<std::string> texts_;
    std::vector<bool> ends_;
    std::vector<std::uint32_t> tokens_;  // in the order of their texts
    std::vector<Node> nodes_;            // in the same order, and one more
    std::size_t depth_ = 0;
};

}  // namespace entropykv
