// Tests products of quantised weights: they are near those of exact arithmetic, and have the same
// bits whatever is read together, with any number of threads and every instruction set.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "platform/instruction_sets.hpp"
#include "platform/stealing_ranges.hpp"
#include "products/product_helpers.hpp"
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

    ProductTask task(int first, int n, std::vector<float>& out) const {
        return {format.type,
                {weights.data(), row_bytes(), shape.rows, shape.values},
                tokens.data() + index(first * shape.values),
                index(shape.values),
                n,
                out.data(),
                index(shape.rows)};
    }
    // Computes tokens [first, first + n) with n_threads threads.
    std::vector<float> product(Products& products, int first, int n, int n_threads) const {
        std::vector<float> out(index(n * shape.rows), NAN);
        const ProductTask task = this->task(first, n, out);
        products.reserve(format.type, shape.rows, shape.values, n);
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
                magnitude +=
                    16 * weights * largest;  // Kernels subtract the zero later, from larger sums.
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

// Products have the same bits with helpers, whatever these finish, also after an op was larger than
// all before.
void test_helpers_have_the_same_bits() {
    std::mt19937 random(9);
    const BlockFormat& format = block_formats().front();
    const Problem small(format, {70, 512, 261}, random), large(format, {700, 1024, 600}, random);
    for (const ProductTable* table : available_products()) {
        Products products(*table, 4), alone(*table, 4);
        const std::vector<float> of_small = small.product(alone, 0, 261, 2);
        const std::vector<float> of_large = large.product(alone, 0, 600, 2);
        CHECK(small.product(products, 0, 261, 1) == of_small);
        for (const int n_helpers : {1, 3, 0, 2}) {
            products.help(n_helpers);
            for (int round = 0; round < 8; ++round)
                for (const int n_threads : {1, 2, 4}) {
                    CHECK(small.product(products, 0, 261, n_threads) == of_small);
                    CHECK(large.product(products, 0, 600, n_threads) == of_large);
                }
        }
        CHECK(products.scratch_bytes() > alone.scratch_bytes());
    }
}

// Waits until helpers have computed all they can without a thread of the op; returns false after
// ten seconds.
bool all_done(const std::function<bool()>& done) {
    for (int i = 0; i < 2000 && !done(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return done();
}

// In normal use, timing decides which of these paths run, because nobody waits for a helper. This
// test makes every path run.
void test_what_helpers_finish_is_copied() {
    std::mt19937 random(10);
    const Problem problem(block_formats().front(), {200, 512, 300}, random);
    for (const ProductTable* table : available_products()) {
        Products alone(*table, 1);
        const std::vector<float> expected = problem.product(alone, 0, 300, 1);
        std::vector<float> out(expected.size(), NAN);
        const ProductTask task = problem.task(0, 300, out);
        const ProductKernels& kernels = table->of(task.type);
        const std::size_t stride = kernels.token_bytes(512);
        AlignedBytes rounded(stride * 300);
        for (int t = 0; t < 300; ++t)
            kernels.quantise(problem.tokens.data() + index(t * 512), 512,
                             rounded.data() + index(t) * stride);
        const ProductPieces pieces(*table, task, rounded.data());
        ProductHelpers helpers(*table);
        CHECK(!helpers.offer(pieces));  // no helper would take pieces
        helpers.wake(2, pieces.size() - 1);
        CHECK(!helpers.offer(pieces));  // There is no room.
        helpers.wake(2, pieces.size());
        CHECK(helpers.offer(pieces));
        CHECK(all_done([&] { return helpers.collect(pieces), out == expected; }));
        bool left = false;
        for (int i = 0; i < pieces.size(); ++i)
            left = left || helpers.claim(i) || helpers.take_back(pieces, i);
        CHECK(!left);

        // Without a copy, each helper ends with its buffers full, which are copied when taken back.
        const int last = pieces.size() - 1;
        for (bool begun = false; !begun;) {  // Helpers may get no core before they rest.
            std::fill(out.begin(), out.end(), NAN);
            helpers.wake(2, pieces.size());
            CHECK(helpers.offer(pieces));
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            helpers.rest();
            begun = !helpers.claim(last);
        }
        CHECK(!helpers.take_back(pieces, last));
        CHECK(out.back() == expected.back());
        CHECK(helpers.claim(0));
        CHECK(!helpers.claim(0));
        CHECK(!helpers.take_back(pieces, 0));
        CHECK(!helpers.offer(pieces));
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

// The compiler's own library, which not every system links, must report the same instruction sets.
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
    StealingRanges ranges(5);
    for (const int n_threads : {1, 2, 5, 3, 4, 1})
        for (const int n_pieces : {0, 1, 3, 97, 1000}) {
            std::vector<std::atomic<int>> taken(static_cast<std::size_t>(n_pieces));
            run_node(n_threads, [&](int t) {
                // This thread never comes; others compute its range.
                if (t == n_threads - 1 && n_threads > 1) return;
                for (int i = 0; (i = ranges.take(n_pieces, t, n_threads)) >= 0;)
                    ++taken[static_cast<std::size_t>(i)];
            });
            for (const std::atomic<int>& n : taken) CHECK(n == 1);
            run_node(n_threads, [&](int) { ranges.leave(n_threads); });
        }
}

// A thread that begins late finds that others have done its part of a single token's product.
void test_nobody_waits_for_a_thread_that_begins_late() {
    std::mt19937 random(11);
    constexpr int kRows = 20003;  // enough for many pieces of a thread
    const Problem problem(block_formats().front(), {kRows, 512, 1}, random);
    for (const ProductTable* table : available_products()) {
        Products alone(*table, 1), products(*table, 3);
        const std::vector<float> expected = problem.product(alone, 0, 1, 1);
        std::vector<float> out(expected.size(), NAN);
        const ProductTask task = problem.task(0, 1, out);
        products.reserve(task.type, kRows, 512, 1);
        for (int late = 0; late < 3; ++late) {
            std::fill(out.begin(), out.end(), NAN);
            for (int t = 0; t < 3; ++t)
                if (t != late) products.multiply(task, t, 3);
            CHECK(out == expected);
            products.multiply(task, late, 3);
            CHECK(out == expected);
        }
    }
}

}  // namespace

int main() {
    test_instruction_sets();
    test_every_piece_is_taken_once();
    test_nobody_waits_for_a_thread_that_begins_late();
    test_all();
    test_helpers_have_the_same_bits();
    test_what_helpers_finish_is_copied();
    test_special_values();
    return summary();
}
