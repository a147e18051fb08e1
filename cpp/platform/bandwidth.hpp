// Measures the bandwidth of the machine's memory: the limit for attention over a cache that fits
// into no cache of the CPU.
#pragma once

#include <cstddef>

namespace entropykv {

// Returns the bytes per second at which n_threads threads together read `bytes` bytes of memory
// once. Throws std::invalid_argument for fewer than 8 bytes, and for no threads, and
// std::logic_error for fewer than 128 bytes per thread.
double read_bandwidth(std::size_t bytes, int n_threads);

}  // namespace entropykv
