// Maps a part of a file into memory. The system shares its pages with all processes that map the
// file, reads them when they are first needed, and copies a page when it is first written to: the
// file never changes. One source file per kind of system defines these functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "platform/mapped_memory.hpp"

namespace entropykv {

class MappedFile {
public:
    // The most files that a process maps at once.
    static constexpr int kMost = 1024;

    // Maps `bytes` bytes of an open file from an offset on. `file` is as in file_access.hpp.
    // Returns null if the system does not do this, if kMost files are mapped already, and for a
    // file that is not regular or shorter: then its bytes have to be read. Throws std::bad_alloc.
    static std::shared_ptr<MappedFile> map(int file, std::size_t offset, std::size_t bytes);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::byte* data() { return memory_.data() + skipped_; }
    std::size_t size() const { return bytes_; }
    // Returns the memory of whole pages of the system. It begins at data() only if the offset is a
    // multiple of the system's pages: see starts_at_page().
    MappedMemory& memory() { return memory_; }
    bool starts_at_page() const { return skipped_ == 0; }

    // Tells whether anyone has written to the file or shortened it since it was mapped; false after
    // let_go(). If so, pages may have other contents than before. Those behind the end of a
    // shortened file are read as zeros: without that, the system would end the process.
    bool has_changed() noexcept;
    // Replaces all pages by zeroed memory that belongs to no file; without memory for that, nothing
    // changes.
    void let_go() noexcept;

private:
    // Identifies the content of a file by its size and the time of its last change.
    struct Version {
        std::int64_t size = -1, seconds = 0, nanoseconds = 0;
        bool operator==(const Version& other) const {
            return size == other.size && seconds == other.seconds &&
                   nanoseconds == other.nanoseconds;
        }
    };

    MappedFile() = default;
    static Version version_of(int file) noexcept;

    void forget_file() noexcept;

    MappedMemory memory_{};
    std::size_t skipped_ = 0;  // bytes from the beginning of the first mapped page to the offset
    std::size_t bytes_ = 0;
    int file_ = -1;   // an own descriptor; -1 once the file was let go
    int watch_ = -1;  // the number of the file's place among the watched ranges
    bool changed_ = false;
    Version version_{};
};

}  // namespace entropykv
