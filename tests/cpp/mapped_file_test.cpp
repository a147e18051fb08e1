// Tests files that are mapped into memory: what the memory holds, that the file never changes, and
// that a process goes on if others change or replace the file. Where the system's files are read
// instead, map() returns null every time and leaves the file as it is.
#include "platform/mapped_file.hpp"

#include <memory>
#include <vector>

#include "platform/file_access.hpp"
#include "temporary_file.hpp"
#include "testing.hpp"

namespace {

constexpr std::size_t kBytes = 200000;  // not a multiple of any system's page size

std::vector<std::byte> content() {
    std::vector<std::byte> bytes(kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) bytes[i] = std::byte(1 + i % 251);
    return bytes;
}

bool is_as_written(const TemporaryFile& file) {
    std::vector<std::byte> now(kBytes);
    return file.bytes() == kBytes && read_at(file.number, now.data(), kBytes, 0) &&
           now == content();
}

std::unique_ptr<TemporaryFile> file_with_content() {
    auto file = std::make_unique<TemporaryFile>();
    CHECK(write_at(file->number, content().data(), kBytes, 0));
    return file;
}

void test_memory_holds_the_rest_of_the_file_and_writing_leaves_the_file() {
    const auto file = file_with_content();
    const std::vector<std::byte> expected = content();
    const std::size_t page = system_page_bytes();
    for (const std::size_t offset : {std::size_t{0}, page, page + 100}) {
        const std::size_t bytes = kBytes - offset;
        const auto mapped = MappedFile::map(file->number, offset, bytes);
        CHECK((mapped != nullptr) == kMapsFiles);
        if (mapped) {
            CHECK(mapped->size() == bytes);
            CHECK(mapped->starts_at_page() == (offset % page == 0));
            const auto* begin = expected.data() + offset;
            CHECK(std::vector<std::byte>(mapped->data(), mapped->data() + bytes) ==
                  std::vector<std::byte>(begin, begin + bytes));
            for (std::size_t i = 0; i < bytes; i += page / 2) mapped->data()[i] = std::byte{0};
            CHECK(!mapped->has_changed());
        }
        CHECK(is_as_written(*file));
    }
}

void test_a_range_that_the_file_does_not_have_is_not_mapped() {
    const auto file = file_with_content();
    CHECK(MappedFile::map(file->number, 0, 0) == nullptr);
    CHECK(MappedFile::map(file->number, 0, kBytes + 1) == nullptr);
    CHECK(MappedFile::map(file->number, 1, kBytes) == nullptr);
    CHECK(MappedFile::map(file->number, kBytes, 1) == nullptr);
    CHECK(MappedFile::map(file->number, static_cast<std::size_t>(-1), 2) == nullptr);
    CHECK(MappedFile::map(-1, 0, 1) == nullptr);
    CHECK(is_as_written(*file));
}

// Windows refuses to shorten a mapped file. That is why nothing maps one there.
void test_others_may_shorten_a_file_that_is_in_use() {
    const auto file = file_with_content();
    const auto mapped = MappedFile::map(file->number, 0, kBytes);
    CHECK(file->cut_to(1000));
    CHECK(file->bytes() == 1000);
    if (!mapped) return;
    CHECK(mapped->data()[kBytes - 1] == std::byte{0});
    CHECK(mapped->data()[999] == content()[999]);
    CHECK(mapped->has_changed());
}

void test_memory_that_was_let_go_is_zeroed_and_knows_no_file() {
    const auto file = file_with_content();
    const auto mapped = MappedFile::map(file->number, 0, kBytes);
    if (mapped) {
        mapped->let_go();
        CHECK(std::vector<std::byte>(mapped->data(), mapped->data() + kBytes) ==
              std::vector<std::byte>(kBytes));
        mapped->data()[0] = std::byte{9};
    }
    CHECK(is_as_written(*file));
    CHECK(file->cut_to(0));
    if (mapped) CHECK(!mapped->has_changed());
}

// A process may also have fewer open files than MappedFile::kMost.
void test_only_so_many_files_are_mapped_at_once() {
    const auto file = file_with_content();
    std::vector<std::shared_ptr<MappedFile>> all;
    while (all.size() <= MappedFile::kMost) {
        all.push_back(MappedFile::map(file->number, 0, kBytes));
        if (all.back() == nullptr) break;
    }
    CHECK(all.size() <= MappedFile::kMost + 1 && all.back() == nullptr);
    CHECK((all.size() > 1) == kMapsFiles);
    all.clear();
    CHECK((MappedFile::map(file->number, 0, kBytes) != nullptr) == kMapsFiles);
}

}  // namespace

int main() {
    test_memory_holds_the_rest_of_the_file_and_writing_leaves_the_file();
    test_a_range_that_the_file_does_not_have_is_not_mapped();
    test_others_may_shorten_a_file_that_is_in_use();
    test_memory_that_was_let_go_is_zeroed_and_knows_no_file();
    test_only_so_many_files_are_mapped_at_once();
    return summary();
}
