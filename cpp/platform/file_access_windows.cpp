#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

#include <algorithm>
#include <cstdint>
#include <system_error>

#include "platform/file_access.hpp"

namespace entropykv {
namespace {

HANDLE handle_of(int file) { return reinterpret_cast<HANDLE>(static_cast<std::intptr_t>(file)); }

OVERLAPPED place_of(std::size_t offset) {
    OVERLAPPED place{};
    place.Offset = static_cast<DWORD>(offset & 0xffffffffu);
    place.OffsetHigh = static_cast<DWORD>(offset >> 32);
    return place;
}

DWORD part_of(std::size_t n) {
    return static_cast<DWORD>(std::min<std::size_t>(n, std::size_t{1} << 30));
}

}  // namespace

bool write_at(int file, const void* data, std::size_t n, std::size_t offset) noexcept {
    const auto* from = static_cast<const char*>(data);
    while (n > 0) {
        OVERLAPPED place = place_of(offset);
        DWORD done = 0;
        if (!WriteFile(handle_of(file), from, part_of(n), &done, &place) || done == 0) return false;
        from += done;
        offset += done;
        n -= done;
    }
    return true;
}

bool read_at(int file, void* data, std::size_t n, std::size_t offset) noexcept {
    auto* to = static_cast<char*>(data);
    while (n > 0) {
        OVERLAPPED place = place_of(offset);
        DWORD done = 0;
        if (!ReadFile(handle_of(file), to, part_of(n), &done, &place) || done == 0) return false;
        to += done;
        offset += done;
        n -= done;
    }
    return true;
}

// Unless a file is sparse or compressed, Windows takes disk space for all of its length.
std::string allocate_at(int file, std::size_t offset, std::size_t n) {
    LARGE_INTEGER length;
    FILE_END_OF_FILE_INFO info;
    info.EndOfFile.QuadPart = static_cast<LONGLONG>(offset + n);
    if (GetFileSizeEx(handle_of(file), &length) &&
        (length.QuadPart >= info.EndOfFile.QuadPart ||
         SetFileInformationByHandle(handle_of(file), FileEndOfFileInfo, &info, sizeof info)))
        return "";
    return std::system_category().message(static_cast<int>(GetLastError()));
}

}  // namespace entropykv
