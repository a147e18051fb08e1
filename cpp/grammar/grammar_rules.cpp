#include "grammar/grammar_rules.hpp"

#include <algorithm>

namespace entropykv {

namespace {

// Returns the last range that begins at or before a code point, or the end of the ranges if there
// is none.
auto range_before(const std::vector<CharacterRange>& ranges, std::uint32_t code_point) {
    const auto after = std::upper_bound(
        ranges.begin(), ranges.end(), code_point,
        [](std::uint32_t value, const CharacterRange& range) { return value < range.first; });
    return after == ranges.begin() ? ranges.end() : after - 1;
}

}  // namespace

CharacterSet::CharacterSet(std::vector<CharacterRange> ranges, bool inverted)
    : inverted_(inverted) {
    std::sort(ranges.begin(), ranges.end(),
              [](const CharacterRange& a, const CharacterRange& b) { return a.first < b.first; });
    for (const CharacterRange& range : ranges) {
        if (range.last < range.first) continue;
        if (!ranges_.empty() && range.first <= ranges_.back().last)
            ranges_.back().last = std::max(ranges_.back().last, range.last);
        else if (!ranges_.empty() && range.first == ranges_.back().last + 1)
            ranges_.back().last = range.last;
        else
            ranges_.push_back(range);
    }
}

bool CharacterSet::has(std::uint32_t code_point) const {
    const auto range = range_before(ranges_, code_point);
    return (range != ranges_.end() && code_point <= range->last) != inverted_;
}

bool CharacterSet::has_any(std::uint32_t first, std::uint32_t last) const {
    const auto range = range_before(ranges_, inverted_ ? first : last);
    if (inverted_) return range == ranges_.end() || range->last < last;
    return range != ranges_.end() && first <= range->last;
}

}  // namespace entropykv
