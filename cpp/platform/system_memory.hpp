// Asks the system for memory: addresses without memory, memory for a part of them,
// and its return. One source file per kind of system defines these functions.
#pragma once

#include <cstddef>

namespace entropykv {

// Memory is mapped in slabs of one huge page each, if the system has huge pages. With small pages,
// reading many pages of a few KiB would cause a TLB miss for each.
constexpr std::size_t kSlabBytes = std::size_t{2} << 20;

std::size_t system_page_bytes();

// Reserves addresses for `bytes` bytes, a multiple of a slab. Where the system has huge pages, they
// begin at a multiple of a slab. Returns null if the system has no addresses left.
std::byte* reserve_addresses(std::size_t bytes);
// Gives back all addresses that one call has reserved, and their memory.
void release_addresses(std::byte* start, std::size_t bytes) noexcept;

// Maps zeroed memory for reserved addresses. Both numbers are multiples of the system's pages.
// Returns false, and changes nothing, if there is no memory.
bool map_memory(std::byte* start, std::size_t bytes);
// Gives back the memory of reserved addresses, which are then inaccessible. Returns false if they
// stay accessible: with zeros, or on Windows with their memory.
bool unmap_memory(std::byte* start, std::size_t bytes) noexcept;

// Tells the system that the content of any memory is not needed any more. Only whole pages within
// the range are affected. What is read there afterwards is undefined.
void discard_memory(void* start, std::size_t bytes) noexcept;

}  // namespace entropykv
