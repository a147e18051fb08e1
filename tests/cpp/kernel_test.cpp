// Tests the attention kernels one at a time, of every instruction set that this machine can run:
// results are near those of the same stored rows in f64. Only one thread is used, so that an
// emulated CPU can run the test.
#include <algorithm>
#include <cmath>
#include <utility>

#include "decide/features.hpp"
#include "decide/rope_params.hpp"
#include "kernel_rows.hpp"
#include "platform/half.hpp"

namespace {

std::vector<Row> make_rows(const Entries& entries, int n, bool masked, bool biased, float softcap,
                           std::mt19937& random) {
    std::vector<Row> rows;
    for (int r = 0; r < n; ++r) {
        std::vector<float> query = random_rows(random, entries.layout.k_stride);
        for (float& q : query) q *= 2.0f / std::sqrt(static_cast<float>(entries.layout.k_dim));
        std::fill(query.begin() + entries.layout.k_dim, query.end(), 0.0f);
        rows.push_back({std::move(query), masked ? kBase - 2 * r : kBase,
                        masked ? -200.0f : kMaskedLogit,
                        biased ? 0.01f * static_cast<float>(r) : 0});
        rows.back().read(entries, softcap);
    }
    return rows;
}

constexpr float kNatsPerBit = 0.69314718f;

// `output`: value d of the row lies at d * stride.
void check_row(const KernelTable& kernels, const Row& row, const Entries& entries, float max,
               float sum, float weighted, const float* output, int stride) {
    const PageLayout& layout = entries.layout;
    const double log_sum = row.max + std::log(row.sum);
    CHECK(near(max + std::log(sum), log_sum, std::max(1.0, std::abs(log_sum))));
    CHECK(near(std::log(sum) - weighted / sum, row.entropy(), 5.0));
    std::vector<float> values(index(layout.v_stride));
    for (int d = 0; d < layout.v_stride; ++d) values[index(d)] = output[d * stride] / sum;
    if (layout.rotated) kernels.rotate(values.data(), layout.v_stride);
    bool close = true;
    for (int d = 0; d < layout.v_dim; ++d)
        close = close && near(values[index(d)], row.value(entries, d), 3.0);
    CHECK(close);
}

void test_decode(const KernelTable& kernels, const Entries& entries, int n_rows, bool windowed,
                 float softcap, std::mt19937& random) {
    const PageLayout& layout = entries.layout;
    std::vector<Row> rows = make_rows(entries, n_rows, false, windowed, 0.0f, random);
    std::vector<float> query, slopes;
    for (Row& row : rows) {
        row.oldest = windowed ? -250.0f : kMaskedLogit;
        row.read(entries, softcap);
        query.insert(query.end(), row.query.begin(), row.query.end());
        slopes.push_back(row.slope);
    }
    std::vector<float> max(16, kMaskedLogit), sum(16), weighted(16),
        logits(index(n_rows * entries.n));
    std::vector<float> output(index(n_rows * layout.v_stride));
    const int cut = entries.n / 3;
    for (const auto& [first, last] : {std::pair{0, cut}, std::pair{cut, entries.n}})
        kernels.decode({entries.range(first, last),
                        query.data(),
                        n_rows,
                        softcap,
                        kBase,
                        windowed ? -250.0f : kMaskedLogit,
                        windowed ? slopes.data() : nullptr,
                        logits.data() + first,
                        index(entries.n),
                        {max.data(), sum.data(), weighted.data(), output.data()},
                        {}});
    bool close = true;
    for (int r = 0; r < n_rows; ++r) {
        const Row& row = rows[index(r)];
        check_row(kernels, row, entries, max[index(r)], sum[index(r)], weighted[index(r)],
                  output.data() + r * layout.v_stride, 1);
        for (int i = 0; i < entries.n; ++i)
            close = close && near(logits[index(r * entries.n + i)], row.logits[index(i)],
                                  std::max(3.0, std::abs(row.logits[index(i)])));
    }
    CHECK(close);
}

double given(Statistic what, const Row& row, int entry, double weight) {
    if (row.logits[index(entry)] == kMaskedLogit) return 0.0;
    if (what == Statistic::product) return weight * std::abs(row.logits[index(entry)]);
    const double p = row.probability(entry);
    return weight * (what == Statistic::squared_probability ? p * p : p);
}

struct PromptRows {
    std::vector<float> query, positions, oldest, slopes;  // of kRowTile rows each
    PromptRows(const std::vector<Row>& rows, int stride)
        : query(index(stride * kRowTile)),
          positions(kRowTile),
          oldest(kRowTile, kMaskedLogit),
          slopes(kRowTile) {
        for (std::size_t r = 0; r < rows.size(); ++r) {
            for (int d = 0; d < stride; ++d)
                query[index(d * kRowTile) + r] = rows[r].query[index(d)];
            positions[r] = static_cast<float>(rows[r].position - kBase);
            slopes[r] = rows[r].slope;
            if (rows[r].oldest > kMaskedLogit) oldest[r] = positions[r] + rows[r].oldest;
        }
    }
};

void test_observe(const KernelTable& kernels, const PromptTask& task, const Entries& entries,
                  const std::vector<Row>& rows) {
    constexpr float kNeighbourhood = 3.0f;
    std::vector<float> weights(kRowTile);
    for (std::size_t r = 0; r < rows.size(); ++r) weights[r] = static_cast<float>(r % 4) / 4;
    for (const Statistic what : {Statistic::squared_probability, Statistic::probability,
                                 Statistic::product, Statistic::largest_probability}) {
        std::vector<float> sums(index(entries.n));
        kernels.prompt_observe(task, what, weights.data(), kNeighbourhood, sums.data());
        bool close = true;
        for (int i = 0; i < entries.n; ++i) {
            double exact = 0.0, size = 1e-3;
            for (std::size_t r = 0; r < rows.size(); ++r) {
                if (rows[r].position - entries.positions[index(i)] < kNeighbourhood) continue;
                const double gift = given(what, rows[r], i, weights[r]);
                size += what == Statistic::product ? 3.0 * weights[r] : gift;
                exact =
                    what == Statistic::largest_probability ? std::max(exact, gift) : exact + gift;
            }
            close = close && near(sums[index(i)], exact, 10 * size);
        }
        CHECK(close);
    }
}

// Weights that are kept give the same bits as weights that are computed again.
void test_kept(const KernelTable& kernels, PromptTask task) {
    std::vector<float> kept(kept_floats(task.entries)), weights(kRowTile, 1.0f);
    const std::size_t n = index(task.entries.last - task.entries.first);
    for (const Statistic what :
         {Statistic::squared_probability, Statistic::probability, Statistic::largest_probability}) {
        std::vector<float> again(n), as_kept(n);
        task.kept = kept.data();
        kernels.prompt(task);
        kernels.prompt_observe(task, what, weights.data(), 3.0f, as_kept.data());
        task.kept = nullptr;
        kernels.prompt_observe(task, what, weights.data(), 3.0f, again.data());
        CHECK(as_kept == again && *std::max_element(again.begin(), again.end()) > 0.0f);
    }
}

void test_prompt(const KernelTable& kernels, const Entries& entries, int n_rows, bool masked,
                 float softcap, std::mt19937& random) {
    const PageLayout& layout = entries.layout;
    const std::vector<Row> rows = make_rows(entries, n_rows, masked, masked, softcap, random);
    const PromptRows tile(rows, layout.k_stride);
    AlignedBytes scratch(prompt_scratch_floats(layout) * sizeof(float));
    std::vector<float> max(kRowTile, kMaskedLogit), sum(kRowTile), weighted(kRowTile);
    std::vector<float> output(index(layout.v_stride * kRowTile));
    PromptTask task{entries.range(0, entries.n / 2),
                    tile.query.data(),
                    kBase,
                    tile.positions.data(),
                    tile.oldest.data(),
                    n_rows,
                    masked,
                    softcap,
                    masked ? tile.slopes.data() : nullptr,
                    reinterpret_cast<float*>(scratch.data()),
                    true,
                    nullptr,
                    {max.data(), sum.data(), weighted.data(), output.data()}};
    kernels.prompt(task);
    task.entries = entries.range(entries.n / 2, entries.n);
    kernels.prompt(task);
    for (int r = 0; r < n_rows; ++r)
        check_row(kernels, rows[index(r)], entries, max[index(r)] * kNatsPerBit, sum[index(r)],
                  weighted[index(r)], output.data() + r, kRowTile);
    task.entries = entries.range(0, entries.n);
    test_observe(kernels, task, entries, rows);
    test_kept(kernels, task);
}

// Tests the logits of a decoded row, the attention that each of its entries gets, and the log of
// their sum.
void test_logits(const KernelTable& kernels, const Entries& entries, std::mt19937& random) {
    const Row row = make_rows(entries, 1, false, false, 0.0f, random)[0];
    const std::vector<float> logits(row.logits.begin(), row.logits.end());
    CHECK(near(kernels.log_sum(logits.data(), entries.n), row.max + std::log(row.sum), 1.0));
    for (const Statistic what : {Statistic::squared_probability, Statistic::probability,
                                 Statistic::product, Statistic::largest_probability}) {
        std::vector<float> sums(index(entries.n), 0.001f);
        kernels.logits_observe(logits.data(), entries.n, what, static_cast<float>(row.max),
                               static_cast<float>(row.sum), sums.data());
        bool close = true;
        for (int i = 0; i < entries.n; ++i) {
            const double gift = given(what, row, i, 1.0);
            const double exact =
                what == Statistic::largest_probability ? std::max(0.001, gift) : 0.001 + gift;
            close = close && near(sums[index(i)], exact, exact);
        }
        CHECK(close);
    }
}

// Tests kernels on whole pages: norms of V, products with K, and products with sketched keys.
void test_pages(const KernelTable& kernels, Entries& entries, std::mt19937& random) {
    const PageLayout& layout = entries.layout;
    constexpr int kQueries = 6;
    const int stride = layout.k_stride;
    std::vector<float> queries = random_rows(random, kQueries * stride);
    for (int i = 0; i < kQueries * stride; ++i)
        if (i % stride >= layout.k_dim) queries[index(i)] = 0.0f;
    std::vector<float> norms(kSlots), out(kQueries * kSlots);
    const std::byte* page = entries.page(0);
    kernels.value_norms(layout, page, norms.data());
    kernels.products(layout, page, queries.data(), kQueries, out.data(), kSlots);
    bool close = true;
    for (int i = 0; i < kSlots; ++i) {
        double norm = 0.0, size = 0.0;
        for (const float v : entries.values[index(i)]) norm += double{v} * v;
        for (int d = 0; d < layout.k_dim; ++d)
            size += std::pow(entries.keys[index(i)][index(d)], 2.0);
        close = close && near(norms[index(i)], norm, norm);
        for (int q = 0; q < kQueries; ++q)
            close = close && near(out[index(q * kSlots + i)],
                                  entries.product(i, queries.data() + q * stride), size);
    }
    CHECK(close);
    const KeySketch sketch(layout);
    AlignedBytes drawn(sketch.page_bytes());
    std::vector<float> room(index(kGroupEntries * layout.k_dim));
    sketch.draw(layout, page, room.data(), drawn.data());
    kernels.sketch_products(sketch, drawn.data(), queries.data(), kQueries, out.data(), kSlots);
    // How many queries come together changes no bit.
    for (int n = 1; n < kQueries; ++n) {
        std::vector<float> fewer(index(n * kSlots));
        kernels.sketch_products(sketch, drawn.data(), queries.data(), n, fewer.data(), kSlots);
        CHECK(std::equal(fewer.begin(), fewer.end(), out.begin()));
    }
    for (int i = 0; i < kSlots; ++i) {
        const std::byte* group = drawn.data() + index(i / kGroupEntries) * sketch.group_bytes();
        const auto* codes = reinterpret_cast<const std::uint32_t*>(group) + i % kGroupEntries;
        double exact[kQueries]{}, size = 0.0;
        for (int d = 0; d < layout.k_dim; ++d) {
            const std::uint32_t code =
                codes[d / kSketchValues * kGroupEntries] >> d % kSketchValues * 4 & 15;
            const double key = half_to_float(sketch.least(group)[d]) +
                               double{half_to_float(sketch.steps(group)[d])} * code;
            for (int q = 0; q < kQueries; ++q) exact[q] += key * queries[index(q * stride + d)];
            size += key * key;
        }
        for (int q = 0; q < kQueries; ++q)
            close = close && near(out[index(q * kSlots + i)], exact[q], size);
    }
    CHECK(close);
}

// Tests keys that are stored without a centre, in units: loading gives the keys back, and products
// are those of queries in the same units, less q.centre.
void test_centre(const KernelTable& kernels, KvType type, int dim, std::mt19937& random) {
    const KeyCentre of{random_rows(random, dim), std::vector<float>(index(dim), 0.5f)};
    KeyCentre large = of;
    large.centre[1] = 300.0f;
    large.centre[index(dim - 1)] = -200.0f;
    large.unit[3] = 8.0f;
    PageLayout layout = make_page_layout(type, dim, 16, kSlots);
    layout.key_centre = &large;
    AlignedBytes page(layout.bytes);
    std::vector<float> query = random_rows(random, layout.k_stride), key(index(dim));
    std::vector<float> in_units(index(layout.k_stride)), out(kSlots);
    for (int d = 0; d < dim; ++d) in_units[index(d)] = query[index(d)] * large.unit[index(d)];
    bool close = true;
    std::vector<double> products;
    for (int slot = 0; slot < kSlots; ++slot) {
        std::vector<float> row = random_rows(random, dim);
        for (int d = 0; d < dim; ++d) row[index(d)] += large.centre[index(d)];
        kernels.store_k(layout, page.data(), slot, row.data());
        load_k(layout, page.data(), slot, key.data());
        double product = 0.0;
        for (int d = 0; d < dim; ++d) {
            // Without its centre, a row has values of fewer than 12 units, which q8_0 rounds to 127
            // steps.
            const float most = large.unit[index(d)] * 12.0f / 127.0f;
            close = close && std::abs(key[index(d)] - row[index(d)]) < most;
            product += double{key[index(d)] - large.centre[index(d)]} * query[index(d)];
        }
        products.push_back(product);
    }
    kernels.products(layout, page.data(), in_units.data(), 1, out.data(), kSlots);
    for (int slot = 0; slot < kSlots; ++slot)
        close = close && near(out[index(slot)], products[index(slot)], dim);
    CHECK(close);
}

void test_moves(const KernelTable& kernels, Entries& entries) {
    const PageLayout& layout = entries.layout;
    const LaneMoves moves{4, {3, 0, 15, 7}, {0, 1, 9, 15}};
    AlignedBytes target(layout.bytes);
    std::copy_n(entries.page(1), layout.bytes, target.data());
    std::vector<float> row(index(layout.k_dim));
    kernels.move_keys(layout, entries.page(0), 1, target.data(), 0, moves);
    for (int i = 0; i < moves.n; ++i)  // move_keys() moves no scales
        copy_value(layout, entries.page(0), kGroupEntries + moves.from[i], target.data(),
                   moves.to[i]);
    bool moved = true;
    for (int slot = 0; slot < kGroupEntries; ++slot) {
        int source = kSlots + slot;
        for (int i = 0; i < moves.n; ++i)
            if (moves.to[i] == slot) source = kGroupEntries + moves.from[i];
        load_k(layout, target.data(), slot, row.data());
        moved = moved && row == entries.keys[index(source)];
    }
    CHECK(moved);
}

// Computes in f64 a key that is rotated back pair by pair, and a linear function of all features.
void test_features(const KernelTable& kernels, const RopeParams& rope, int k_dim, int v_dim,
                   bool latent, std::mt19937& random) {
    const FeatureShape shape = feature_shape(k_dim, v_dim, latent, rope);
    InverseRope inverse_rope(rope);
    inverse_rope.prepare(1000, 3);
    const std::vector<float> key = random_rows(random, k_dim), value = random_rows(random, v_dim);
    std::vector<float> weights = random_rows(random, shape.n), found(index(shape.n), NAN);
    kernels.features(shape, key.data(), latent ? nullptr : value.data(), inverse_rope.of(2),
                     found.data());
    std::vector<double> exact(key.begin(), key.end());
    std::vector<double> norms;
    const auto log_norm = [](const std::vector<float>& row) {
        double sum = 0.0;
        for (const float x : row) sum += double{x} * x;
        return std::log(std::sqrt(sum) + 1e-6);
    };
    const int pairs = rope.n_dims / 2;
    for (int i = 0; i < pairs; ++i) {
        const std::size_t first = index(rope.offset + (rope.neox ? i : 2 * i));
        const std::size_t second = first + index(rope.neox ? pairs : 1);
        const double angle = -1002.0 * rope_frequencies(rope)[index(i)];
        const double x = key[first], y = key[second];
        exact[first] = x * std::cos(angle) - y * std::sin(angle);
        exact[second] = x * std::sin(angle) + y * std::cos(angle);
        norms.push_back(std::hypot(x, y));
    }
    if (!latent) exact.insert(exact.end(), value.begin(), value.end());
    exact.insert(exact.end(), norms.begin(), norms.end());
    exact.push_back(log_norm(key));
    if (!latent) exact.push_back(log_norm(value));
    exact.push_back(1.0);
    CHECK(exact.size() == found.size());
    double sum = 0.0;
    bool close = true;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        close = close && near(found[i], exact[i], 4.0);
        sum += exact[i] * weights[i];
    }
    CHECK(close);
    float said = kernels.predict_key(shape, weights.data(), key.data(), inverse_rope.of(2));
    if (!latent) said += kernels.predict_value(shape, weights.data(), value.data());
    CHECK(near(said, sum, 100.0));
}

void test_sums_of_products(const KernelTable& kernels, int n, std::mt19937& random) {
    constexpr int kRows = 21;
    const int stride = (n + 15) / 16 * 16;
    std::vector<float> rows = random_rows(random, kRows * stride);
    std::vector<double> sums(index(n * (n + 1) / 2), 1.0);
    for (int row = 0; row < kRows; ++row)
        std::fill(rows.begin() + row * stride + n, rows.begin() + (row + 1) * stride, 0.0f);
    kernels.add_products(rows.data(), kRows, stride, n, sums.data());
    bool close = true;
    std::size_t at = 0;
    for (int i = 0; i < n; ++i)
        for (int j = 0; j <= i; ++j, ++at) {
            double exact = 1.0;
            for (int row = 0; row < kRows; ++row)
                exact += double{rows[index(row * stride + i)]} * rows[index(row * stride + j)];
            close = close && near(static_cast<float>(sums[at]), exact, 20.0);
        }
    CHECK(close);
}

void test_prediction(const KernelTable& kernels, std::mt19937& random) {
    RopeParams none, neighbours, halves;
    neighbours.n_dims = halves.n_dims = 24;
    neighbours.offset = halves.offset = 6;
    halves.neox = true;
    for (const RopeParams& rope : {none, neighbours, halves})
        for (const auto& [k_dim, v_dim] : {std::pair{64, 64}, std::pair{33, 70}, std::pair{80, 16}})
            for (const bool latent : {false, true})
                test_features(kernels, rope, k_dim, v_dim, latent, random);
    for (const int n : {1, 3, 4, 15, 16, 17, 31, 64, 163})
        test_sums_of_products(kernels, n, random);
    for (const float no_share : {-1000.0f, NAN, -INFINITY})
        CHECK(predicted_share(no_share) == kLeastPrediction);
    CHECK(predicted_share(2.0f) == 1.0f && predicted_share(INFINITY) == 1.0f);
    CHECK(near(predicted_share(-3.0f), std::exp(-3.0), 1.0));
}

void test_table(const KernelTable& kernels) {
    std::mt19937 random(11);
    for (const Shape& shape :
         {Shape{KvType::f16, 64, 64, false}, Shape{KvType::q8_0, 64, 64, false},
          Shape{KvType::f16, 40, 24, false}, Shape{KvType::q8_0, 24, 104, false},
          Shape{KvType::f16, 80, 64, true}, Shape{KvType::q8_0, 80, 64, true},
          Shape{KvType::q8_0_iq4_nl, 64, 64, false}, Shape{KvType::q8_0_iq4_nl, 24, 104, false},
          Shape{KvType::q8_0_iq4_nl, 80, 64, true}}) {
        Entries entries(kernels, shape, 333, random);
        for (const int n_rows : {1, 2, 3, 7, 16})
            if (!shape.latent)
                for (const float softcap : {0.0f, 2.0f})
                    test_decode(kernels, entries, n_rows, n_rows % 2 == 1, softcap, random);
        for (const int n_rows : {1, 30, 64})
            for (const bool masked : {false, true})
                test_prompt(kernels, entries, n_rows, masked, masked ? 2.0f : 0.0f, random);
        test_logits(kernels, entries, random);
        test_pages(kernels, entries, random);
        test_moves(kernels, entries);
    }
    for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
        for (const int dim : {24, 64, 80}) test_centre(kernels, type, dim, random);
    test_prediction(kernels, random);
}

}  // namespace

int main() {
    for (const KernelTable* kernels : available_kernels()) test_table(*kernels);
    return summary();
}
