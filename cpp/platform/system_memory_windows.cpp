// Windows counts memory when it is mapped, not when it is first written, and has no huge pages for
// processes without a special right.
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

#include <cstdint>

#include "platform/system_memory.hpp"

namespace entropykv {

std::size_t system_page_bytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

std::byte* reserve_addresses(std::size_t bytes) {
    return static_cast<std::byte*>(VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS));
}

void release_addresses(std::byte* start, std::size_t) noexcept {
    VirtualFree(start, 0, MEM_RELEASE);
}

bool map_memory(std::byte* start, std::size_t bytes) {
    return VirtualAlloc(start, bytes, MEM_COMMIT, PAGE_READWRITE) != nullptr;
}

bool unmap_memory(std::byte* start, std::size_t bytes) noexcept {
    return VirtualFree(start, bytes, MEM_DECOMMIT) != 0;
}

void discard_memory(void* start, std::size_t bytes) noexcept {
    const std::size_t page = system_page_bytes();
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    const std::uintptr_t first = (address + page - 1) / page * page;
    const std::uintptr_t last = (address + bytes) / page * page;
    // After MEM_RESET the system does not write the pages to its file, and takes them when memory
    // is short.
    if (last > first)
        VirtualAlloc(reinterpret_cast<void*>(first), last - first, MEM_RESET, PAGE_READWRITE);
}

}  // namespace entropykv
