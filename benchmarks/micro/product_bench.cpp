// Compares our products of quantised weights with those of the installed llama.cpp, in alternation,
// by the CPU time of one thread. Beside the speed, it prints the errors of both against a product
// in f64 of the same weights and unrounded activations, relative to its root mean square.
// Built with the sources of bitnet.cpp, it shows that library's kernel beside ternary ones.
//     product_bench [values [rows [tokens,tokens,... [type]]]]
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "bitnet_cpp.hpp"
#include "platform/aligned_bytes.hpp"
#include "products/product_kernels.hpp"

namespace {

using namespace entropykv;  // NOLINT: a benchmark of all of it

constexpr int kPasses = 5;
constexpr double kPassSeconds = 0.02;
constexpr int kChecked = 64;  // rows and tokens whose error is measured

struct Served {
    ggml_type stock;
    WeightType ours;
};
constexpr Served kServed[] = {
    {GGML_TYPE_TQ2_0, WeightType::tq2_0}, {GGML_TYPE_TQ1_0, WeightType::tq1_0},
    {GGML_TYPE_Q4_0, WeightType::q4_0},   {GGML_TYPE_Q4_1, WeightType::q4_1},
    {GGML_TYPE_Q8_0, WeightType::q8_0},   {GGML_TYPE_Q4_K, WeightType::q4_k},
    {GGML_TYPE_Q5_K, WeightType::q5_k},   {GGML_TYPE_Q6_K, WeightType::q6_k},
    {GGML_TYPE_Q5_0, WeightType::q5_0},   {GGML_TYPE_Q5_1, WeightType::q5_1},
    {GGML_TYPE_F16, WeightType::f16}};

double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double seconds_of(const std::function<void()>& action) {
    int n = 0;
    const double start = cpu_seconds();
    double now = start;
    for (; now < start + kPassSeconds; ++n, now = cpu_seconds()) action();
    return (now - start) / n;
}

// Holds a matrix of random weights and random tokens, in the form of both libraries.
class Subject {
public:
    Subject(const Served& served, int n_values, int n_rows, int n_tokens, ggml_backend_t backend,
            ggml_backend_buffer_type_t weights_at)
        : served_(served), n_values_(n_values), n_rows_(n_rows), n_tokens_(n_tokens) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        std::vector<float> f32(size(n_values) * size(n_rows));
        for (float& w : f32) w = normal(random);
        tokens_.resize(size(n_values) * size(n_tokens));
        for (float& x : tokens_) x = normal(random);
        weights_.resize(ggml_row_size(served.stock, n_values) * size(n_rows));
        ggml_quantize_chunk(served.stock, f32.data(), weights_.data(), 0, n_rows, n_values,
                            nullptr);
        build_stock(backend, weights_at);
    }
    ~Subject() {
        ggml_backend_buffer_free(weight_buffer_);
        ggml_backend_buffer_free(buffer_);
        ggml_free(weight_context_);
        ggml_free(context_);
    }
    Subject(const Subject&) = delete;
    Subject& operator=(const Subject&) = delete;

    void run_stock() { ggml_backend_graph_compute(backend_, graph_); }
    std::vector<float> stock() {
        std::vector<float> out(size(n_rows_) * size(n_tokens_));
        ggml_backend_tensor_get(product_, out.data(), 0, out.size() * sizeof(float));
        return out;
    }

    void run_ours(const ProductTable& table) {
        const ProductKernels& kernels = table.of(served_.ours);
        const std::size_t stride = kernels.token_bytes(n_values_);
        if (rounded_.size() < stride * size(n_tokens_))
            rounded_ = AlignedBytes(stride * size(n_tokens_));
        if (scratch_.size() < table.tile_bytes) scratch_ = AlignedBytes(table.tile_bytes);
        out_.resize(size(n_rows_) * size(n_tokens_));
        for (int t = 0; t < n_tokens_; ++t)
            kernels.quantise(tokens_.data() + size(t) * size(n_values_), n_values_,
                             rounded_.data() + size(t) * stride);
        WeightRows w{weights_.data(), ggml_row_size(served_.stock, n_values_), n_rows_, n_values_};
        if (n_tokens_ == 1) return kernels.one(w, rounded_.data(), out_.data());
        for (int token = 0; token < n_tokens_; token += kTileTokens)
            for (int row = 0; row < n_rows_; row += table.tile_rows) {
                w.data = weights_.data() + size(row) * w.stride;
                w.n_rows = std::min(table.tile_rows, n_rows_ - row);
                kernels.many(w,
                             {rounded_.data() + size(token) * stride, stride,
                              std::min(kTileTokens, n_tokens_ - token)},
                             scratch_.data(), out_.data() + size(token) * size(n_rows_) + row,
                             size(n_rows_));
            }
    }
    const std::vector<float>& ours() const { return out_; }

    double error(const std::vector<float>& out) const {
        std::vector<float> row(size(n_values_));
        double difference = 0.0, total = 0.0;
        for (int r = 0; r < std::min(n_rows_, kChecked); ++r) {
            ggml_get_type_traits(served_.stock)
                ->to_float(weights_.data() + size(r) * ggml_row_size(served_.stock, n_values_),
                           row.data(), n_values_);
            for (int t = 0; t < std::min(n_tokens_, kChecked); ++t) {
                double exact = 0.0;
                for (int i = 0; i < n_values_; ++i)
                    exact += double{row[size(i)]} * tokens_[size(t) * size(n_values_) + size(i)];
                const double found = out[size(t) * size(n_rows_) + size(r)];
                difference += (found - exact) * (found - exact);
                total += exact * exact;
            }
        }
        return std::sqrt(difference / total);
    }
    std::size_t weight_bytes() const { return weights_.size(); }

private:
    static std::size_t size(int i) { return static_cast<std::size_t>(i); }

    void build_stock(ggml_backend_t backend, ggml_backend_buffer_type_t weights_at) {
        backend_ = backend;
        const ggml_init_params params{1 << 20, nullptr, true};
        weight_context_ = ggml_init(params);
        context_ = ggml_init(params);
        ggml_tensor* w = ggml_new_tensor_2d(weight_context_, served_.stock, n_values_, n_rows_);
        weight_buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(weight_context_, weights_at);
        ggml_backend_buffer_set_usage(weight_buffer_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_set(w, weights_.data(), 0, weights_.size());
        ggml_tensor* x = ggml_new_tensor_2d(context_, GGML_TYPE_F32, n_values_, n_tokens_);
        product_ = ggml_mul_mat(context_, w, x);
        graph_ = ggml_new_graph(context_);
        ggml_build_forward_expand(graph_, product_);
        buffer_ = ggml_backend_alloc_ctx_tensors(context_, backend);
        ggml_backend_tensor_set(x, tokens_.data(), 0, tokens_.size() * sizeof(float));
    }

    Served served_;
    int n_values_, n_rows_, n_tokens_;
    std::vector<float> tokens_, out_;
    std::vector<std::byte> weights_;
    AlignedBytes rounded_, scratch_;
    ggml_backend_t backend_ = nullptr;
    ggml_context *weight_context_ = nullptr, *context_ = nullptr;
    ggml_backend_buffer_t weight_buffer_ = nullptr, buffer_ = nullptr;
    ggml_tensor* product_ = nullptr;
    ggml_cgraph* graph_ = nullptr;
};

void measure(const Served& served, int n_values, int n_rows, int n_tokens, ggml_backend_t backend) {
    Subject subject(served, n_values, n_rows, n_tokens, backend, ggml_backend_cpu_buffer_type());
    const double operations = 2.0 * n_values * n_rows * n_tokens;
    subject.run_stock();
    const auto tables = available_products();
    std::vector<double> best(tables.size() + 1, 1e9);
    for (int pass = 0; pass < kPasses; ++pass) {
        best[0] = std::min(best[0], seconds_of([&] { subject.run_stock(); }));
        for (std::size_t i = 0; i < tables.size(); ++i)
            best[i + 1] = std::min(best[i + 1], seconds_of([&] { subject.run_ours(*tables[i]); }));
    }
    const auto print = [&](const char* name, double seconds, double error) {
        std::printf("%-5s %4d tokens  %-11s %9.1f us  %6.1f GOPS  %5.1f GB/s  %5.2fx  error %.2e\n",
                    ggml_type_name(served.stock), n_tokens, name, 1e6 * seconds,
                    1e-9 * operations / seconds,
                    1e-9 * static_cast<double>(subject.weight_bytes()) / seconds, best[0] / seconds,
                    error);
    };
    print("stock", best[0], subject.error(subject.stock()));
    for (std::size_t i = 0; i < tables.size(); ++i) {
        subject.run_ours(*tables[i]);
        print(tables[i]->name, best[i + 1], subject.error(subject.ours()));
    }
#if defined(ENTROPYKV_BITNET_CPP)
    if (served.stock == GGML_TYPE_TQ2_0) {
        BitnetCpp peer(n_values, n_rows, n_tokens);
        double seconds = 1e9;
        for (int pass = 0; pass < kPasses; ++pass)
            seconds = std::min(seconds, seconds_of([&] { peer.run(); }));
        print("bitnet.cpp", seconds, peer.is_right(n_rows / 2, n_tokens - 1) ? 0.0 : INFINITY);
    }
#endif
    std::fflush(stdout);
}

std::vector<int> numbers(const std::string& list) {
    std::vector<int> out;
    for (std::size_t first = 0; first < list.size();) {
        out.push_back(std::atoi(list.c_str() + first));
        const std::size_t comma = list.find(',', first);
        first = comma == std::string::npos ? list.size() : comma + 1;
    }
    return out;
}

}  // namespace

int main(int argc, char** argv) {
    const int n_values = argc > 1 ? std::atoi(argv[1]) : 2560;
    const int n_rows = argc > 2 ? std::atoi(argv[2]) : 2560;
    const std::vector<int> counts = numbers(argc > 3 ? argv[3] : "1,2,4,8,32,512");
    const std::string type = argc > 4 ? argv[4] : "";
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 1);
    for (const Served& served : kServed)
        for (const int n_tokens : counts)
            if ((type.empty() || type == ggml_type_name(served.stock)) &&
                n_values % ggml_blck_size(served.stock) == 0)
                measure(served, n_values, n_rows, n_tokens, backend);
    ggml_backend_free(backend);
}
