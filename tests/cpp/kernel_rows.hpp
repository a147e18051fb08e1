// Holds stored rows of K and V, and computes attention over them in f64, which the kernels must
// come near.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "page/page_layout.hpp"
#include "platform/aligned_bytes.hpp"
#include "testing.hpp"

constexpr float kNear = 2e-3f;  // a query rounded to bf16 is off by this part
constexpr int kSlots = 32;      // two groups
constexpr std::int32_t kBase = 1000000;

inline bool near(double found, double exact, double size) {
    return std::abs(found - exact) <= kNear * size;
}

struct Shape {
    KvType type;
    int k_dim, v_dim;
    bool latent;
};

// Holds entries in pages, and their rows as they are stored. Some positions are skipped.
class Entries {
public:
    Entries(const KernelTable& kernels, const Shape& shape, int n, std::mt19937& random)
        : layout(make_page_layout(shape.type, shape.k_dim, shape.v_dim, kSlots, shape.latent)),
          n(n) {
        std::int32_t position = kBase - n - n / 3;
        for (int i = 0; i < n; ++i) {
            if (i % kSlots == 0) memory_.emplace_back(layout.bytes);
            std::byte* page = memory_.back().data();
            const int slot = i % kSlots;
            const std::vector<float> k = random_rows(random, shape.k_dim);
            const std::vector<float> v = random_rows(random, shape.v_dim);
            kernels.store_k(layout, page, slot, k.data());
            if (!shape.latent) kernels.store_v(layout, page, slot, v.data());
            layout.positions(page)[slot] = position += 1 + i % 3 / 2;
            positions.push_back(position);
            keys.emplace_back(index(shape.k_dim));
            values.emplace_back(index(shape.v_dim));
            load_k(layout, page, slot, keys.back().data());
            load_v(layout, page, slot, values.back().data());
            check_stored(k, keys.back());
            if (!shape.latent) check_values(v, values.back());
        }
        for (const AlignedBytes& page : memory_) pages.push_back(page.data());
    }

    double product(int entry, const float* query) const {
        double sum = 0.0;
        for (int d = 0; d < layout.k_dim; ++d)
            sum += double{keys[index(entry)][index(d)]} * query[d];
        return sum;
    }
    EntryRange range(int first, int last) const { return {&layout, pages.data(), first, last}; }
    std::byte* page(int i) { return memory_[index(i)].data(); }

    PageLayout layout;
    int n;
    std::vector<const std::byte*> pages;
    std::vector<std::int32_t> positions;
    std::vector<std::vector<float>> keys, values;

private:
    static void check_stored(const std::vector<float>& row, const std::vector<float>& stored) {
        float largest = 0.0f;
        for (const float x : row) largest = std::max(largest, std::abs(x));
        bool close = true;
        for (std::size_t d = 0; d < row.size(); ++d)
            close = close && std::abs(row[d] - stored[d]) <= largest / 127 * 0.51f;
        CHECK(close);
    }

    // Values of 4 bits are off by some 8 % of their root mean square.
    void check_values(const std::vector<float>& row, const std::vector<float>& stored) const {
        if (!layout.rotated) return check_stored(row, stored);
        double error = 0.0, size = 0.0;
        for (std::size_t d = 0; d < row.size(); ++d) {
            error += std::pow(double{row[d]} - stored[d], 2.0);
            size += std::pow(double{row[d]}, 2.0);
        }
        CHECK(error < 0.15 * 0.15 * size);
    }

    std::vector<AlignedBytes> memory_;
};

// Holds a query row, which entries it sees, and what attention over them must give.
struct Row {
    std::vector<float> query;  // [k_stride]
    std::int32_t position;
    float oldest;  // relative to the position
    float slope;
    std::vector<double> logits{};          // kMaskedLogit where the row does not see the entry
    double max = kMaskedLogit, sum = 0.0;  // of the row's softmax

    void read(const Entries& entries, float softcap) {
        logits.clear();
        for (int i = 0; i < entries.n; ++i) {
            const auto distance = static_cast<double>(entries.positions[index(i)] - position);
            double logit = entries.product(i, query.data());
            if (softcap > 0.0f) logit = softcap * std::tanh(logit / softcap);
            logits.push_back(distance > 0 || distance < oldest ? kMaskedLogit
                                                               : logit + slope * distance);
        }
        max = *std::max_element(logits.begin(), logits.end());
        sum = 0.0;
        for (const double logit : logits) sum += std::exp(logit - max);
    }
    double probability(int i) const { return std::exp(logits[index(i)] - max) / sum; }
    double entropy() const {
        double total = 0.0;
        for (int i = 0; i < static_cast<int>(logits.size()); ++i) {
            const double p = probability(i);
            total -= p > 0.0 ? p * std::log(p) : 0.0;
        }
        return total;
    }
    double value(const Entries& entries, int d) const {
        double total = 0.0;
        for (int i = 0; i < entries.n; ++i)
            total += probability(i) * entries.values[index(i)][index(d)];
        return total;
    }
};
