#include "cold/cold_storage.hpp"

#include <cstring>
#include <string>

#include "platform/file_access.hpp"

namespace entropykv {

std::uint32_t ColdStorage::take() {
    if (free_.empty()) {
        make_room(free_, n_pages_ + 1);  // Freeing pages must allocate nothing.
        grow(n_pages_ + 1);
        return static_cast<std::uint32_t>(n_pages_++);
    }
    const std::uint32_t page = free_.back();
    free_.pop_back();
    return page;
}

// Allocates a slab at a time, since frozen entries become more and more.
void MemoryStorage::grow(std::size_t n_pages) {
    pages_.grow(n_pages, n_pages + kSlabBytes / page_bytes());
}

bool MemoryStorage::write(std::uint32_t page, const std::byte* data) noexcept {
    std::memcpy(pages_.at(page), data, page_bytes());
    return true;
}

const std::byte* MemoryStorage::read(std::uint32_t page, std::byte*) noexcept {
    return pages_.at(page);
}

namespace {

constexpr std::size_t kGrowBytes = std::size_t{4} << 20;

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15u;
    return a ^ (a >> 29);
}

}  // namespace

// Allocates disk space before it is needed, so that a full disk is reported here and not in the
// middle of a micro-batch.
void FileStorage::grow(std::size_t n_pages) {
    const std::size_t needed = place(static_cast<std::uint32_t>(n_pages));
    if (needed <= allocated_) return;
    const std::size_t start = allocated_ == 0 ? kHeaderBytes : allocated_;
    const std::size_t end = needed + kGrowBytes;
    const std::string error = allocate_at(file_, start, end - start);
    if (!error.empty()) throw ColdStorageError(error);
    allocated_ = end;
}

std::size_t FileStorage::place(std::uint32_t page) const {
    return kHeaderBytes + page * (page_bytes() + sizeof(std::uint64_t));
}

std::uint64_t FileStorage::checksum(std::uint32_t page, const std::byte* data) const noexcept {
    std::uint64_t sums[4] = {nonce_[0], nonce_[1], page, page_bytes()};
    std::size_t i = 0;
    for (; i + sizeof sums <= page_bytes(); i += sizeof sums) {
        std::uint64_t words[4];
        std::memcpy(words, data + i, sizeof words);
        for (int lane = 0; lane < 4; ++lane) sums[lane] = mixed(sums[lane], words[lane]);
    }
    for (; i < page_bytes(); ++i) sums[0] = mixed(sums[0], static_cast<std::uint64_t>(data[i]));
    return mixed(mixed(sums[0], sums[1]), mixed(sums[2], sums[3]));
}

bool FileStorage::write(std::uint32_t page, const std::byte* data) noexcept {
    const std::uint64_t sum = checksum(page, data);
    const bool written = write_at(file_, data, page_bytes(), place(page)) &&
                         write_at(file_, &sum, sizeof sum, place(page) + page_bytes());
    if (!written) fail("cannot be written");
    return written;
}

const std::byte* FileStorage::read(std::uint32_t page, std::byte* buffer) noexcept {
    std::uint64_t sum = 0;
    if (!read_at(file_, buffer, page_bytes(), place(page)) ||
        !read_at(file_, &sum, sizeof sum, place(page) + page_bytes())) {
        fail("cannot be read, or was cut short");
        return nullptr;
    }
    if (sum != checksum(page, buffer)) {
        fail("does not hold what was written to it");
        return nullptr;
    }
    return buffer;
}

}  // namespace entropykv
