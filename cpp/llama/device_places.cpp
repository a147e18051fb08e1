#include "llama/device_places.hpp"

#include <algorithm>
#include <functional>

namespace entropykv {

std::size_t SingleSteps::bytes() const {
    std::size_t sum = written.capacity();
    for (const auto* memory : {&masks, &input, &queries})
        if (*memory != nullptr) sum += (*memory)->bytes();
    return sum;
}

bool DevicePlaces::can_take(int place, const std::vector<int>& budgets) const {
    const auto found = taken_.find(place);
    return (found == taken_.end() || !found->second) && budgets.size() == budgets_.size() &&
           std::equal(budgets.begin(), budgets.end(), budgets_.begin(), std::less_equal<>());
}

}  // namespace entropykv
