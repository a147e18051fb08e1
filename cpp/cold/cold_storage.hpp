// Stores the pages of frozen entries in memory or in a file. All pages have the same size, and
// their contents are up to the caller.
// A file is read and written, not mapped, because access to a mapping that was cut short ends the
// process. Every page of a file has a checksum over its bytes, its number and a nonce of the
// session, so that only what this session wrote there is ever accepted.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "platform/mapped_pages.hpp"
#include "platform/scratch.hpp"

namespace entropykv {

struct ColdStorageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class ColdStorage {
public:
    explicit ColdStorage(std::size_t page_bytes) : page_bytes_(page_bytes) {}
    virtual ~ColdStorage() = default;
    ColdStorage(const ColdStorage&) = delete;
    ColdStorage& operator=(const ColdStorage&) = delete;

    // Returns a page for a later write(). Throws ColdStorageError or std::bad_alloc if there is no
    // room.
    std::uint32_t take();
    void release(std::uint32_t page) { free_.push_back(page); }
    // Counts the memory used, including pages that are not in use.
    virtual std::size_t memory_bytes() const { return heap_bytes(free_); }

    // Threads may read and write different pages at the same time. On errors, write() returns
    // false and read() null: see failed().
    virtual bool write(std::uint32_t page, const std::byte* data) noexcept = 0;
    // Returns the bytes of the page: either in place, or in `buffer`, which has page_bytes() bytes.
    virtual const std::byte* read(std::uint32_t page, std::byte* buffer) noexcept = 0;
    virtual bool in_place() const { return false; }

    std::size_t page_bytes() const { return page_bytes_; }
    // Returns the size of the file so far; 0 in memory.
    virtual std::size_t file_bytes() const { return 0; }
    // Returns the first error, or null; it is never cleared.
    const char* failed() const { return failed_.load(std::memory_order_relaxed); }

protected:
    virtual void grow(std::size_t n_pages) = 0;
    void fail(const char* why) {
        const char* none = nullptr;
        failed_.compare_exchange_strong(none, why, std::memory_order_relaxed);
    }

private:
    std::size_t page_bytes_;
    std::size_t n_pages_ = 0;
    std::vector<std::uint32_t> free_;
    std::atomic<const char*> failed_{nullptr};
};

class MemoryStorage final : public ColdStorage {
public:
    explicit MemoryStorage(std::size_t page_bytes) : ColdStorage(page_bytes), pages_(page_bytes) {}
    bool write(std::uint32_t page, const std::byte* data) noexcept override;
    const std::byte* read(std::uint32_t page, std::byte* buffer) noexcept override;
    bool in_place() const override { return true; }
    std::size_t memory_bytes() const override {
        return ColdStorage::memory_bytes() + pages_.bytes();
    }

protected:
    void grow(std::size_t n_pages) override;

private:
    MappedPages pages_;
};

class FileStorage final : public ColdStorage {
public:
    // The file begins with this many bytes, which are left to the caller.
    static constexpr std::size_t kHeaderBytes = 4096;

    // The file must stay open; the caller closes it. See platform/file_access.hpp for its number.
    FileStorage(std::size_t page_bytes, int file, std::array<std::uint64_t, 2> nonce)
        : ColdStorage(page_bytes), file_(file), nonce_(nonce) {}
    bool write(std::uint32_t page, const std::byte* data) noexcept override;
    const std::byte* read(std::uint32_t page, std::byte* buffer) noexcept override;
    std::size_t file_bytes() const override { return allocated_; }

protected:
    void grow(std::size_t n_pages) override;

private:
    std::size_t place(std::uint32_t page) const;
    std::uint64_t checksum(std::uint32_t page, const std::byte* data) const noexcept;

    int file_;
    std::array<std::uint64_t, 2> nonce_;
    std::size_t allocated_ = 0;  // bytes of the file
};

}  // namespace entropykv
