// Reads and writes an open file at a place, which several threads may do at once. One source file
// per kind of system defines these functions. `file` is a POSIX descriptor, or a handle of Windows,
// which fits into 32 bits. A descriptor of Windows' C library would be one of the caller's library
// only, and there may be several in a process.
#pragma once

#include <cstddef>
#include <string>

namespace entropykv {

// Reads or writes exactly n bytes; returns false if that fails or the file ends before.
bool read_at(int file, void* data, std::size_t n, std::size_t offset) noexcept;
bool write_at(int file, const void* data, std::size_t n, std::size_t offset) noexcept;

// Takes disk space for n bytes from `offset` on, which must not lie behind the end of the file, and
// makes the file longer if it ends before. Returns why that failed, or an empty string.
std::string allocate_at(int file, std::size_t offset, std::size_t n);

}  // namespace entropykv
