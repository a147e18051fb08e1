#include "decide/budget.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace entropykv {
namespace {

// Shares `total` in proportion to the weights with no share above its cap.
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

// What heads can take beyond their floors.
std::vector<double> rooms(const BudgetRequest& request) {
    std::vector<double> rooms(request.entries_per_page.size());
    for (std::size_t i = 0; i < rooms.size(); ++i)
        rooms[i] = request.limit_of(i) - request.floor_of(i);
    return rooms;
}

// All that is beyond the floors.
double to_share(const BudgetRequest& request) {
    const std::size_t n_heads = request.entries_per_page.size();
    double total = static_cast<double>(std::min(request.mean_entries, request.max_entries)) *
                   static_cast<double>(n_heads);
    for (std::size_t i = 0; i < n_heads; ++i) total -= request.floor_of(i);
    return total;
}

// Where nothing has to be weighed: every head gets the mean, or the most that it can use.
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

// Entries of every head from what it should get beyond the floor, in whole pages: rounded down
// first; then a page more for the heads that lost most by rounding.
std::vector<int> in_pages(const BudgetRequest& request, const std::vector<double>& shares) {
    const std::size_t n_heads = request.entries_per_page.size();
    const int mean = std::min(request.mean_entries, request.max_entries);
    long entries_left = static_cast<long>(mean) * static_cast<long>(n_heads);
    long pages_left = 0;
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
    // Heads at a floor that fills no whole page can use more pages than their share.
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
