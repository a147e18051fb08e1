// What an entry of a KV head is told by when it is written, for linear functions of it. A name and
// numbers alone: kernels are compiled for several instruction sets and must not bring inline
// functions along.
#pragma once

namespace entropykv {

// Features of a layer's entries, float32, in this order: the key turned back to position 0 (k_dim;
// values that RoPE does not turn as they are), the value (v_dim; none where it is a part of the
// key), the norms of the key's rotation pairs (n_pairs), log(|key| + 1e-6), log(|value| + 1e-6)
// (none where the value is a part of the key), 1.
struct FeatureShape {
    int k_dim;
    int v_dim;         // 0: the value is a part of the key
    int n_pairs;       // that RoPE turns
    int first_pair;    // the first value that it turns
    int pair_step;     // from the first value of a pair to that of the next one
    int pair_apart;    // from the first value of a pair to its second one
    int norms_at;      // where the norms of the pairs begin
    int key_log_at;    // where the logarithms of the norms are
    int value_log_at;  // of no meaning where the value is a part of the key
    int n;             // features, the 1 at the end included
};

// What is added to a norm before its logarithm is taken.
constexpr float kLeastNorm = 1e-6f;
// A predicted share of attention lies between this and 1: the functions say its logarithm.
constexpr float kLeastPrediction = 1e-6f;

}  // namespace entropykv
