// Makes files without a name, with their number for platform/file_access.hpp on every system, and
// says whether the system maps files.
#pragma once

#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

// Where files are not mapped, MappedFile::map() returns null, and they are read.
#if defined(_WIN32)
constexpr bool kMapsFiles = false;
#else
constexpr bool kMapsFiles = true;
#endif

// Returns the number by which platform/file_access.hpp knows a file.
inline int number_of(std::FILE* file) {
#if defined(_WIN32)
    return static_cast<int>(static_cast<std::intptr_t>(_get_osfhandle(_fileno(file))));
#else
    return fileno(file);
#endif
}

// Holds a file without a name, which the system removes when the object ends.
class TemporaryFile {
public:
    TemporaryFile() : file_(std::tmpfile()) {
        if (file_ == nullptr) throw std::runtime_error("no temporary file can be made");
        number = number_of(file_);
    }
    ~TemporaryFile() { std::fclose(file_); }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    // Makes the file shorter; returns false if that fails.
    bool cut_to(std::size_t bytes) const {
#if defined(_WIN32)
        return _chsize_s(_fileno(file_), static_cast<long long>(bytes)) == 0;
#else
        return ftruncate(number, static_cast<off_t>(bytes)) == 0;
#endif
    }
    std::size_t bytes() const {
        std::fseek(file_, 0, SEEK_END);
        return static_cast<std::size_t>(std::ftell(file_));
    }

    int number = -1;

private:
    std::FILE* file_;
};
