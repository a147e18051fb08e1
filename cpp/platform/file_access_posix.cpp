#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "platform/file_access.hpp"

namespace entropykv {

bool write_at(int file, const void* data, std::size_t n, std::size_t offset) noexcept {
    const auto* from = static_cast<const char*>(data);
    while (n > 0) {
        const ssize_t done = pwrite(file, from, n, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        from += done;
        offset += static_cast<std::size_t>(done);
        n -= static_cast<std::size_t>(done);
    }
    return true;
}

bool read_at(int file, void* data, std::size_t n, std::size_t offset) noexcept {
    auto* to = static_cast<char*>(data);
    while (n > 0) {
        const ssize_t done = pread(file, to, n, static_cast<off_t>(offset));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        to += done;
        offset += static_cast<std::size_t>(done);
        n -= static_cast<std::size_t>(done);
    }
    return true;
}

std::string allocate_at(int file, std::size_t offset, std::size_t n) {
#if defined(__APPLE__)
    // Without posix_fallocate, take blocks beyond those that the file has, then set its length.
    const off_t end = static_cast<off_t>(offset + n);
    const off_t length = lseek(file, 0, SEEK_END);
    if (length < 0) return std::strerror(errno);
    if (end <= length) return "";
    fstore_t request{F_ALLOCATEALL, F_PEOFPOSMODE, 0, end - length, 0};
    if (fcntl(file, F_PREALLOCATE, &request) == -1 && errno != ENOTSUP) return std::strerror(errno);
    return ftruncate(file, end) == 0 ? "" : std::strerror(errno);
#else
    const int error = posix_fallocate(file, static_cast<off_t>(offset), static_cast<off_t>(n));
    return error == 0 ? "" : std::strerror(error);
#endif
}

}  // namespace entropykv
