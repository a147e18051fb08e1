#include "decide/budget.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>

namespace entropykv {
namespace {

// Shares `total` in proportion to the weights, so that no share exceeds its cap.
std::vector<double> capped_shares(const std::vector<double>& weights, double total,
                                  const std::vector<double>& caps) {
    std::vector<double> shares(weights.size(), 0.0);
    std::vector<bool> capped(weights.size(), false);
    double rest = total;
    for (bool again = true; again;) {
        again = false;
        double weight_sum = 0.0;
        for (std::size_t i = 0; i < weights.size(); ++i)
            if (!capped[i]) weight_sum += weights[i];
        if (weight_sum < 1e-6) break;
        const double unit = rest / weight_sum;
        for (std::size_t i = 0; i < weights.size(); ++i) {
            if (capped[i]) continue;
            shares[i] = unit * weights[i];
            if (shares[i] > caps[i]) {
                shares[i] = caps[i];
                capped[i] = true;
                rest -= caps[i];
                again = true;
                break;
            }
        }
    }
    return shares;
}

void check(const BudgetRequest& request) {
    if (request.mean_entries < request.floor_entries)
        throw std::invalid_argument("the mean budget is below the floor");
    for (const int per_page : request.entries_per_page)
        if (per_page < 1) throw std::invalid_argument("a page must hold an entry");
    if (!request.limits.empty() && request.limits.size() != request.entries_per_page.size())
        throw std::invalid_argument("limits must be one for every KV head, or none");
    for (const int limit : request.limits)
        if (limit < 1) throw std::invalid_argument("a limit below 1");
}

// Returns how many entries each head can take beyond its floor.
std::vector<double> rooms(const BudgetRequest& request) {
    std::vector<double> rooms(request.entries_per_page.size());
    for (std::size_t i = 0; i < rooms.size(); ++i)
        rooms[i] = request.limit_of(i) - request.floor_of(i);
    return rooms;
}

double to_share(const BudgetRequest& request) {
    const std::size_t n_heads = request.entries_per_page.size();
    double total = static_cast<double>(std::min(request.mean_entries, request.max_entries)) *
                   static_cast<double>(n_heads);
    for (std::size_t i = 0; i < n_heads; ++i) total -= request.floor_of(i);
    return total;
}

// Tells whether all heads get the same budget: there are no weights, and every head can use the
// mean.
bool is_even(const BudgetRequest& request, int mean) {
    for (std::size_t i = 0; i < request.limits.size(); ++i)
        if (request.limit_of(i) < mean) return false;
    return request.weights.empty();
}

std::vector<int> all_limits(const BudgetRequest& request) {
    std::vector<int> limits(request.entries_per_page.size());
    for (std::size_t i = 0; i < limits.size(); ++i) limits[i] = request.limit_of(i);
    return limits;
}

// Converts shares beyond the floors to budgets in whole pages: rounds all down, then gives one more
// page each to the heads that lost most by rounding.
std::vector<int> in_pages(const BudgetRequest& request, const std::vector<double>& shares) {
    const std::size_t n_heads = request.entries_per_page.size();
    const int mean = std::min(request.mean_entries, request.max_entries);
    std::int64_t entries_left =
        static_cast<std::int64_t>(mean) * static_cast<std::int64_t>(n_heads);
    std::int64_t pages_left = 0;
    for (const int per_page : request.entries_per_page) pages_left += pages_for(mean, per_page);

    std::vector<int> budgets(n_heads);
    std::vector<double> wanted(n_heads);
    for (std::size_t i = 0; i < n_heads; ++i) {
        const int per_page = request.entries_per_page[i];
        wanted[i] = request.floor_of(i) + shares[i];
        const int whole = static_cast<int>(wanted[i]) / per_page * per_page;
        budgets[i] = std::max(whole, request.floor_of(i));
        if (wanted[i] >= request.limit_of(i)) budgets[i] = request.limit_of(i);
        entries_left -= budgets[i];
        pages_left -= pages_for(budgets[i], per_page);
    }
    // Pages are rounded up where a floor or a limit fills no whole page, so the heads may take more
    // pages than there are: the largest ones give some back.
    while (pages_left < 0) {
        const auto largest = std::max_element(budgets.begin(), budgets.end());
        const auto head = static_cast<std::size_t>(largest - budgets.begin());
        const int per_page = request.entries_per_page[head];
        const int fewer = std::max(request.floor_of(head), (*largest - 1) / per_page * per_page);
        pages_left += pages_for(*largest, per_page) - pages_for(fewer, per_page);
        entries_left += *largest - fewer;
        *largest = fewer;
    }
    std::vector<std::size_t> order(n_heads);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return wanted[a] - budgets[a] > wanted[b] - budgets[b];
    });
    for (const std::size_t i : order) {
        const int per_page = request.entries_per_page[i];
        const int next = std::min((budgets[i] / per_page + 1) * per_page, request.limit_of(i));
        const int more_pages = pages_for(next, per_page) - pages_for(budgets[i], per_page);
        if (next - budgets[i] > entries_left || more_pages > pages_left) continue;
        entries_left -= next - budgets[i];
        pages_left -= more_pages;
        budgets[i] = next;
    }
    return budgets;
}

struct Segment {
    double slope;  // loss that one more entry saves, 0 or more
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

// Appends the segments of the lower convex hull of one head's losses, up to `most` entries, from
// the steepest to the flattest.
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

int BudgetRequest::limit_of(std::size_t head) const {
    return limits.empty() ? max_entries : std::min(limits[head], max_entries);
}

int BudgetRequest::floor_of(std::size_t head) const {
    return std::min(floor_entries, limit_of(head));
}

int pages_for(int entries, int entries_per_page) {
    return (entries + entries_per_page - 1) / entries_per_page;
}

std::vector<double> entropy_weights(const std::vector<double>& entropies, double mean, double low,
                                    double high) {
    std::vector<double> weights(entropies.size(), 1.0);
    if (mean <= 0.0) return weights;
    for (std::size_t i = 0; i < entropies.size(); ++i)
        weights[i] = std::clamp(entropies[i] / mean, low, high);
    return weights;
}

std::vector<int> share_budget(const BudgetRequest& request) {
    check(request);
    const std::size_t n_heads = request.entries_per_page.size();
    if (!request.weights.empty() && request.weights.size() != n_heads)
        throw std::invalid_argument("weights must be one for every KV head, or none");
    for (const double weight : request.weights)
        if (!(weight >= 0.0 && weight <= 1e6))
            throw std::invalid_argument("a weight outside of 0 .. 1e6");
    const int mean = std::min(request.mean_entries, request.max_entries);
    if (mean == request.max_entries) return all_limits(request);
    if (is_even(request, mean)) return std::vector<int>(n_heads, mean);
    const std::vector<double> even(n_heads, 1.0);
    const std::vector<double>& weights = request.weights.empty() ? even : request.weights;
    return in_pages(request, capped_shares(weights, to_share(request), rooms(request)));
}

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

std::vector<int> share_by_curves(const BudgetRequest& request, const LossTable& curves) {
    check(request);
    const std::size_t n_heads = request.entries_per_page.size();
    if (curves.losses.size() != n_heads * curves.knots.size())
        throw std::invalid_argument("losses must be [head][knot]");
    const int mean = std::min(request.mean_entries, request.max_entries);
    if (mean == request.max_entries) return all_limits(request);
    return in_pages(request, curve_shares(curves, to_share(request), rooms(request)));
}

}  // namespace entropykv
