// Tests products of quantised weights: they are near those of exact arithmetic, and have the same
// bits whatever is read together, with any number of threads and every instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "platform/instruction_sets.hpp"
#include "platform/stealing_ranges.hpp"
#include "products/products.hpp"
#include "testing.hpp"
#include "weight_blocks.hpp"

namespace {

// Shapes have rows, values and tokens with remainders of every tile, panel and step.
struct Shape {
    int rows, values, tokens;
};
constexpr Shape kShapes[] = {{37, 256, 7}, {8, 1280, 3}, {70, 512, 261}, {13, 77, 8}};

struct Problem {
    const BlockFormat& format;
    Shape shape;
    std::vector<std::byte> weights;
    std::vector<float> tokens;

    Problem(const BlockFormat& format, const Shape& shape, std::mt19937& random)
        : format(format),
          shape(shape),
          weights(random_blocks(random, format, shape.rows * shape.values / format.values)),
          tokens(random_rows(random, shape.values * shape.tokens)) {}

    std::size_t row_bytes() const { return index(shape.values / format.values * format.bytes); }
    double weight(int row, int i) const {
        const std::byte* block =
            weights.data() + index(row) * row_bytes() + index(i / format.values * format.bytes);
        return Block(block).value(format.type, i % format.values);
    }
    float token(int t, int i) const { return tokens[index(t * shape.values + i)]; }

    // Computes tokens [first, first + n) with n_threads threads.
    std::vector<float> product(Products& products, int first, int n, int n_threads) const {
        std::vector<float> out(index(n * shape.rows), NAN);
        const ProductTask task{format.type,
                               {weights.data(), row_bytes(), shape.rows, shape.values},
                               tokens.data() + index(first * shape.values),
                               index(shape.values),
                               n,
                               out.data(),
                               index(shape.rows)};
        products.reserve(format.type, shape.values, n);
        run_node(n_threads, [&](int t) { products.multiply(task, t, n_threads); });
        return out;
    }
};

// Rounding changes an activation by at most half a step of its group; f16 weights need no rounding.
void test_accuracy(const Problem& problem, const std::vector<float>& out) {
    const int group = problem.format.values;
    bool near = true;
    for (int t = 0; t < problem.shape.tokens; t += 13)
        for (int row = 0; row < problem.shape.rows; ++row) {
            double exact = 0.0, bound = 0.0, magnitude = 0.0;
            for (int first = 0; first < problem.shape.values; first += group) {
                float largest = 0.0f;
                double weights = 0.0;
                for (int i = first; i < first + group; ++i) {
                    const double weight = problem.weight(row, i);
                    largest = std::max(largest, std::abs(problem.token(t, i)));
                    weights += std::abs(weight);
                    exact += weight * problem.token(t, i);
                }
                magnitude += 16 * weights * largest;  // of codes, before the zero is subtracted
                if (problem.format.rounds()) bound += weights * largest / 127 / 2;
            }
            const double error = std::abs(out[index(t * problem.shape.rows + row)] - exact);
            near = near && error <= bound * 1.0001 + 1e-6 * magnitude;
        }
    CHECK(near);
}

void test_same_bits(const Problem& problem, Products& products, const std::vector<float>& out) {
    const int n_tokens = problem.shape.tokens;
    for (const int n_threads : {1, 2, 5})
        CHECK(problem.product(products, 0, n_tokens, n_threads) == out);
    std::vector<float> alone, cut;
    for (int t = 0; t < n_tokens; ++t) {
        const std::vector<float> one = problem.product(products, t, 1, t % 3 + 1);
        alone.insert(alone.end(), one.begin(), one.end());
    }
    for (int first = 0, n = 1; first < n_tokens; first += n, ++n) {
        n = std::min(n, n_tokens - first);
        const std::vector<float> part = problem.product(products, first, n, 2);
        cut.insert(cut.end(), part.begin(), part.end());
    }
    CHECK(alone == out);
    CHECK(cut == out);
}

void test_all() {
    std::mt19937 random(7);
    for (const BlockFormat& format : block_formats())
        for (const Shape& shape : kShapes) {
            if (shape.values % format.values != 0) continue;
            const Problem problem(format, shape, random);
            std::vector<float> first;
            for (const ProductTable* table : available_products()) {
                Products products(*table, 4);
                const std::vector<float> out = problem.product(products, 0, shape.tokens, 2);
                if (first.empty()) first = out;
                CHECK(out == first);
                test_accuracy(problem, out);
                test_same_bits(problem, products, out);
            }
        }
}

// Zeros give zeros. Values that are not numbers stay so, and the reader of the logits can see it.
void test_special_values() {
    std::mt19937 random(8);
    for (const BlockFormat& format : block_formats()) {
        Problem problem(format, {9, 512, 3}, random);
        std::fill_n(problem.tokens.begin(), 512, 0.0f);
        problem.tokens[600] = std::numeric_limits<float>::quiet_NaN();
        problem.tokens[1030] = std::numeric_limits<float>::infinity();
        for (const ProductTable* table : available_products()) {
            Products products(*table, 1);
            const std::vector<float> out = problem.product(products, 0, 3, 1);
            CHECK(std::all_of(out.begin(), out.begin() + 9, [](float x) { return x == 0.0f; }));
            CHECK(
                std::none_of(out.begin() + 9, out.end(), [](float x) { return std::isfinite(x); }));
        }
    }
}

// The compiler's own library, which not every system links, says the same about this CPU.
void test_instruction_sets() {
#if defined(ENTROPYKV_X86) && defined(__linux__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = __builtin_cpu_supports("avx512vnni");
    CHECK(has_avx2() == avx2);
    CHECK(has_avx512() == (avx2 && avx512));
    CHECK(has_avx512_vnni() == (avx2 && avx512 && vnni));
#if defined(ENTROPYKV_AVX_VNNI)
    const bool avx_vnni = __builtin_cpu_supports("avxvnni");
    CHECK(has_avx_vnni() == (avx2 && avx_vnni));
#endif
#endif
}

void test_every_piece_is_taken_once() {
    for (const int n_threads : {1, 2, 5})
        for (const int n_pieces : {0, 1, 3, 97, 1000}) {
            StealingRanges ranges(n_threads);
            std::vector<std::atomic<int>> taken(static_cast<std::size_t>(n_pieces));
            ranges.deal(n_pieces, n_threads);
            run_node(n_threads, [&](int t) {
                if (t == n_threads - 1 && n_threads > 1) return;  // others take its range
                for (int i = ranges.take(t, n_threads); i >= 0; i = ranges.take(t, n_threads))
                    ++taken[static_cast<std::size_t>(i)];
            });
            for (const std::atomic<int>& n : taken) CHECK(n == 1);
        }
}

}  // namespace

int main() {
    test_instruction_sets();
    test_every_piece_is_taken_once();
    test_all();
    test_special_values();
    return summary();
}
