// Reads the text of a grammar character by character.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace entropykv {

class GrammarText {
public:
    explicit GrammarText(std::string_view text) : text_(text) {}

    bool at_end() const { return at_ >= text_.size(); }
    char peek(std::size_t ahead = 0) const {
        return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
    }
    void advance(std::size_t n = 1) { at_ += n; }
    // Takes the expected text if it is next.
    bool take(std::string_view expected);
    // Skips spaces and comments, and if `lines` is true also ends of lines.
    void skip_space(bool lines);
    // Takes the end of a line if it is next.
    bool take_line_end();
    // Takes a name of letters, digits and hyphens; returns an empty string if there is none.
    std::string take_name();
    // Takes a number; numbers beyond 2^60 count as 2^60.
    std::uint64_t take_number();
    // Takes a character or an escape sequence.
    std::uint32_t take_character();
    // Takes everything up to and including a character.
    std::string take_through(char last);

    // Throws std::invalid_argument with a message and the number of the current line.
    [[noreturn]] void fail(const std::string& what) const;

private:
    std::uint32_t take_hexadecimal(int n_digits);
    std::uint32_t take_utf8();

    std::string_view text_;
    std::size_t at_ = 0;
};

bool is_digit(char c);
bool is_name(char c);

}  // namespace entropykv
