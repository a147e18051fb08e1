// What the machine can read: the limit of an attention over a cache that fits into no other memory.
#pragma once

#include <cstddef>

namespace entropykv {

// Bytes per second at which n_threads threads read `bytes` bytes of memory once, each a part of
// its own. Throws std::invalid_argument unless both are above 0.
double read_bandwidth(std::size_t bytes, int n_threads);

}  // namespace entropykv
