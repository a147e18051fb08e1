// Holds types and numbers that the kernels share with the code that calls them. Kernels are
// compiled for several instruction sets, so this header must contain no inline functions: the
// linker would keep one version of each, which another CPU may not run.
#pragma once

namespace entropykv {

// Says what a query gives to an entry that it sees. What several queries give is added up, but of
// largest_probability only the largest value counts.
enum class Statistic {
    squared_probability,
    probability,
    product,  // |logit|
    largest_probability,
};

// Says where the features of a layer's entries lie. They are float32, in this order: the key
// rotated back to position 0 (k_dim; values that RoPE does not rotate are as they are), the value
// (v_dim; none if it is a part of the key), the norms of the key's rotation pairs (n_pairs),
// log(|key| + 1e-6), log(|value| + 1e-6) (none if the value is a part of the key), and 1.
struct FeatureShape {
    int k_dim;
    int v_dim;       // 0: the value is a part of the key
    int n_pairs;     // pairs that RoPE rotates
    int first_pair;  // index of the first value that RoPE rotates
    int pair_step;   // distance from the first value of a pair to that of the next pair
    int pair_apart;  // distance from the first value of a pair to its second one
    int norms_at;    // index of the norms of the pairs
    int key_log_at;  // index of the logarithm of the key's norm
    // Indexes the logarithm of the value's norm; unused if the value is a part of the key.
    int value_log_at;
    int n;  // number of features, including the 1
};

// Is added to a norm before its logarithm is taken.
constexpr float kLeastNorm = 1e-6f;
// Predicted shares of attention lie between this and 1. The linear functions predict the logarithms
// of these shares.
constexpr float kLeastPrediction = 1e-6f;

}  // namespace entropykv
