#include "grammar/grammar_text.hpp"

#include <algorithm>
#include <stdexcept>

namespace entropykv {

namespace {

// Numbers are limited so that ten times as much fits into 64 bits.
constexpr std::uint64_t kMostNumber = std::uint64_t{1} << 60;

}  // namespace

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || is_digit(c);
}

bool GrammarText::take(std::string_view expected) {
    if (text_.substr(std::min(at_, text_.size()), expected.size()) != expected) return false;
    at_ += expected.size();
    return true;
}

void GrammarText::skip_space(bool lines) {
    while (!at_end()) {
        const char c = peek();
        if (c == '#') {
            while (!at_end() && peek() != '\n' && peek() != '\r') advance();
        } else if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r'))) {
            advance();
        } else {
            return;
        }
    }
}

bool GrammarText::take_line_end() { return take("\r\n") || take("\n") || take("\r"); }

std::string GrammarText::take_name() {
    const std::size_t begin = at_;
    while (is_name(peek())) advance();
    return std::string(text_.substr(begin, at_ - begin));
}

std::uint64_t GrammarText::take_number() {
    if (!is_digit(peek())) fail("a number is expected");
    std::uint64_t number = 0;
    for (; is_digit(peek()); advance())
        number = std::min(number * 10 + static_cast<std::uint64_t>(peek() - '0'), kMostNumber);
    return number;
}

std::uint32_t GrammarText::take_character() {
    if (at_end()) fail("a quote or a bracket is not closed");
    if (!take("\\")) return take_utf8();
    const char c = peek();
    advance();
    switch (c) {
        case 'x': return take_hexadecimal(2);
        case 'u': return take_hexadecimal(4);
        case 'U': return take_hexadecimal(8);
        case 't': return '\t';
        case 'r': return '\r';
        case 'n': return '\n';
        case '\\':
        case '"':
        case '[':
        case ']':
        case '-': return static_cast<std::uint32_t>(c);
        default: fail("a backslash stands before one of x u U t r n \\ \" [ ] -");
    }
}

std::string GrammarText::take_through(char last) {
    const std::size_t end = text_.find(last, at_);
    if (end == std::string_view::npos) fail(std::string("a ") + last + " is missing");
    const std::string taken(text_.substr(at_, end + 1 - at_));
    at_ = end + 1;
    return taken;
}

void GrammarText::fail(const std::string& what) const {
    const auto end = text_.begin() + static_cast<std::ptrdiff_t>(std::min(at_, text_.size()));
    const auto line = 1 + std::count(text_.begin(), end, '\n');
    throw std::invalid_argument("line " + std::to_string(line) + ": " + what);
}

std::uint32_t GrammarText::take_hexadecimal(int n_digits) {
    std::uint32_t value = 0;
    for (int i = 0; i < n_digits; i++, advance()) {
        const char c = peek();
        if (!is_digit(c) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F'))
            fail(std::to_string(n_digits) +
                 " hexadecimal digits are expected after \\x, \\u or \\U");
        const int digit = is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10;
        value = value * 16 + static_cast<std::uint32_t>(digit);
    }
    return value;
}

std::uint32_t GrammarText::take_utf8() {
    const auto first = static_cast<unsigned char>(peek());
    advance();
    if (first < 0x80) return first;
    const int n_more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4) fail("the text is no UTF-8");
    auto value = static_cast<std::uint32_t>(first & (0x3F >> n_more));
    for (int i = 0; i < n_more; i++, advance()) {
        const auto next = static_cast<unsigned char>(peek());
        if ((next & 0xC0) != 0x80) fail("the text is no UTF-8");
        value = (value << 6) | (next & 0x3FU);
    }
    return value;
}

}  // namespace entropykv
