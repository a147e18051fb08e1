#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "platform/system_memory.hpp"

namespace entropykv {
namespace {

// Mappings belong to no file. While nobody may access one, it does not count as used memory.
constexpr int kOfNoFile = MAP_PRIVATE | MAP_ANONYMOUS;

// All parts of a range have the same attributes except for their protection, so that the system
// needs at most two mappings: one with memory, one without.
void ask_for_huge_pages(std::byte* start, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

}  // namespace

std::size_t system_page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

std::byte* reserve_addresses(std::size_t bytes) {
    // One slab more is reserved, so that the memory can begin at a multiple of a slab.
    const std::size_t total = bytes + kSlabBytes;
    void* memory = mmap(nullptr, total, PROT_NONE, kOfNoFile, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    auto* start = static_cast<std::byte*>(memory);
    const auto over = reinterpret_cast<std::uintptr_t>(start) % kSlabBytes;
    std::byte* data = over == 0 ? start : start + (kSlabBytes - over);
    const auto* end = start + total;
    if (data > start) munmap(start, static_cast<std::size_t>(data - start));
    if (data + bytes < end) munmap(data + bytes, static_cast<std::size_t>(end - (data + bytes)));
    ask_for_huge_pages(data, bytes);
    return data;
}

void release_addresses(std::byte* start, std::size_t bytes) noexcept { munmap(start, bytes); }

bool map_memory(std::byte* start, std::size_t bytes) {
    return mprotect(start, bytes, PROT_READ | PROT_WRITE) == 0;
}

// If the system refuses to split the mapping, the memory is still freed, and comes back when
// someone writes to it.
bool unmap_memory(std::byte* start, std::size_t bytes) noexcept {
    if (mmap(start, bytes, PROT_NONE, kOfNoFile | MAP_FIXED, -1, 0) == MAP_FAILED) {
        madvise(start, bytes, MADV_DONTNEED);
        return false;
    }
    ask_for_huge_pages(start, bytes);
    return true;
}

void discard_memory(void* start, std::size_t bytes) noexcept {
    const std::size_t page = system_page_bytes();
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    const std::uintptr_t first = (address + page - 1) / page * page;
    const std::uintptr_t last = (address + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace entropykv
