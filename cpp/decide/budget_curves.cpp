// Shares by loss curves: greedy on lower convex hulls.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "decide/budget.hpp"

namespace entropykv {
namespace {

struct Segment {
    double slope;  // loss saved per entry, 0 or more
    double length;
    std::size_t head;
};

void check(const LossTable& curves) {
    if (curves.knots.empty() || curves.knots.front() != 0.0)
        throw std::invalid_argument("the first knot must be 0");
    for (std::size_t i = 1; i < curves.knots.size(); ++i)
        if (!(curves.knots[i] > curves.knots[i - 1]))
            throw std::invalid_argument("knots must ascend");
    if (curves.losses.size() % curves.knots.size() != 0)
        throw std::invalid_argument("losses must be [head][knot]");
    for (const double loss : curves.losses)
        if (!(loss >= 0.0 && loss <= 1e9))
            throw std::invalid_argument("a loss outside of 0 .. 1e9");
}

// Appends the segments of one head's lower convex hull up to `most` entries; they get less steep
// from left to right.
void add_hull(const std::vector<double>& knots, const double* losses, std::size_t head, double most,
              std::vector<Segment>& segments) {
    std::vector<std::size_t> hull{0};
    const auto slope = [&](std::size_t a, std::size_t b) {
        return (losses[a] - losses[b]) / (knots[b] - knots[a]);
    };
    for (std::size_t i = 1; i < knots.size(); ++i) {
        while (hull.size() > 1 &&
               slope(hull.back(), i) >= slope(hull[hull.size() - 2], hull.back()))
            hull.pop_back();
        hull.push_back(i);
    }
    for (std::size_t i = 1; i < hull.size() && knots[hull[i - 1]] < most; ++i)
        segments.push_back({std::max(slope(hull[i - 1], hull[i]), 0.0),
                            std::min(knots[hull[i]], most) - knots[hull[i - 1]], head});
}

}  // namespace

std::vector<double> curve_shares(const LossTable& curves, double total,
                                 const std::vector<double>& most) {
    check(curves);
    const std::size_t n_knots = curves.knots.size();
    const std::size_t n_heads = curves.losses.size() / n_knots;
    std::vector<Segment> segments;
    for (std::size_t head = 0; head < n_heads; ++head)
        add_hull(curves.knots, curves.losses.data() + head * n_knots, head,
                 most.empty() ? curves.knots.back() : most[head], segments);
    std::stable_sort(segments.begin(), segments.end(),
                     [](const Segment& a, const Segment& b) { return a.slope > b.slope; });
    std::vector<double> shares(n_heads, 0.0);
    for (std::size_t first = 0; first < segments.size() && total > 0.0;) {
        std::size_t last = first;
        double length = 0.0;
        for (;
             last < segments.size() && segments[last].slope >= segments[first].slope * (1 - 1e-12);
             ++last)
            length += segments[last].length;
        const double part = std::min(1.0, total / length);
        for (; first < last; ++first) shares[segments[first].head] += part * segments[first].length;
        total -= part * length;
    }
    return shares;
}

}  // namespace entropykv
