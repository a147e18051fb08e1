#include "store/rope.hpp"

#include <cmath>
#include <stdexcept>
#include <unordered_map>

namespace entropykv {
namespace {

// Holds cosine and sine of every pair's angle, for the differences of positions that occur.
class Angles {
public:
    explicit Angles(const RopeParams& params) : frequencies_(rope_frequencies(params)) {}

    const float* of(std::int32_t difference) {
        std::vector<float>& row = rows_[difference];
        if (row.empty()) {
            for (const double frequency : frequencies_) {
                row.push_back(static_cast<float>(std::cos(difference * frequency)));
                row.push_back(static_cast<float>(std::sin(difference * frequency)));
            }
        }
        return row.data();
    }

private:
    std::vector<double> frequencies_;
    std::unordered_map<std::int32_t, std::vector<float>> rows_;
};

void check(const HeadStore& store, const std::vector<RopeParams>& ropes) {
    if (ropes.size() != static_cast<std::size_t>(store.n_layers()))
        throw std::invalid_argument("there must be RoPE parameters for every layer");
    for (int layer = 0; layer < store.n_layers(); ++layer) {
        if (!fits(ropes[static_cast<std::size_t>(layer)], store.shape(layer).k_dim))
            throw std::invalid_argument("RoPE parameters that do not fit the keys of a layer");
    }
}

}  // namespace

void rebase(HeadStore& store, const KernelTable& kernels, const std::vector<RopeParams>& ropes,
            int n_sinks, int old_shift, int new_shift) {
    check(store, ropes);
    StoreComponents& components = store.components();
    components.copy_shared_pages();
    Angles angles(ropes.front());
    for (int layer = 0; layer < store.n_layers(); ++layer) {
        const auto number = static_cast<std::size_t>(layer);
        const RopeParams& rope = ropes[number];
        if (number > 0 && !(rope == ropes[number - 1])) angles = Angles(rope);
        if (rope.n_dims == 0) continue;
        float row[kMaxHeadDim];
        const auto difference_at = [&](std::int32_t position) {
            return rope_position(position, n_sinks, new_shift) -
                   rope_position(position, n_sinks, old_shift);
        };
        std::byte* buffer = components.workspaces.front().page_read.data();
        for (Head& head : components.layers[number].heads) {
            const PageLayout& layout = head.layout();
            const auto rotate_key = [&](std::byte* page, int slot, std::int32_t position) {
                load_k(layout, page, slot, row);
                rotate(rope, angles.of(difference_at(position)), row);
                kernels.store_k(layout, page, slot, row);
            };
            for (int i = 0; i < head.count(); ++i) {
                if (difference_at(head.position(i)) == 0) continue;
                const Slot slot = head.place(i);
                rotate_key(slot.page, slot.index, head.position(i));
            }
            if (head.frozen)
                head.frozen.cold->rewrite(*components.common.kernels, buffer, difference_at,
                                          rotate_key);
        }
    }
}

}  // namespace entropykv
