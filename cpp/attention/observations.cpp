#include "attention/observations.hpp"

#include <algorithm>

#include "platform/scratch.hpp"

namespace entropykv {
namespace {

void take_larger(float* total, const float* more, int n) {
    for (int j = 0; j < n; ++j) total[j] = std::max(total[j], more[j]);
}

}  // namespace

void Observations::begin(const Room& room) {
    longest_ = room.longest;
    odd_layers_at_ = room.single ? room.rows * longest_ : 0;
    grow(observed_, odd_layers_at_ + room.rows * longest_);
    grow(logits_, room.logits * longest_);
}

void Observations::begin_carrying(int layer, std::size_t n_heads, bool observing_echo) {
    grow(carried_[index(layer)].observed, n_heads * longest_ * (observing_echo ? 2 : 1));
    grow(carried_[index(layer)].squares, n_heads);
}

void Observations::release() {
    for (std::vector<float>* values : {&logits_, &observed_}) std::vector<float>().swap(*values);
    for (Carried& carried : carried_) carried = Carried{};
}

float* Observations::sum(int layer, int first, int n_rows, int n) noexcept {
    float* total = row(layer, first);
    for (int number = 1; number < n_rows; ++number) add_up(total, row(layer, first + number), n);
    return total;
}

float* Observations::largest(int layer, int first, int n_rows, int n) noexcept {
    float* total = row(layer, first);
    for (int number = 1; number < n_rows; ++number)
        take_larger(total, row(layer, first + number), n);
    return total;
}

void Observations::add_up(float* total, const float* more, int n) const noexcept {
    if (measure_.by_largest()) {
        take_larger(total, more, n);
    } else {
        for (int j = 0; j < n; ++j) total[j] += more[j];
    }
}

float* Observations::carry(int layer, int head, bool is_first, const float* observed, float squares,
                           int n) noexcept {
    Carried& carried = carried_[index(layer)];
    float& so_far = carried.squares[index(head)];
    so_far = squares + (is_first ? 0.0f : so_far);
    if (observed == nullptr) return nullptr;
    float* total = carried.observed.data() + index(head) * longest_;
    if (is_first) {
        std::copy(observed, observed + n, total);
    } else {
        add_up(total, observed, n);
    }
    return total;
}

float* Observations::carry_largest(int layer, int number, bool is_first, const float* echo_shares,
                                   int n) noexcept {
    float* total = carried_[index(layer)].observed.data() + index(number) * longest_;
    if (is_first) {
        std::copy(echo_shares, echo_shares + n, total);
    } else {
        take_larger(total, echo_shares, n);
    }
    return total;
}

std::size_t Observations::bytes() const {
    std::size_t bytes = bytes_of(logits_) + bytes_of(observed_);
    for (const Carried& carried : carried_)
        bytes += bytes_of(carried.observed) + bytes_of(carried.squares);
    return bytes;
}

}  // namespace entropykv
