// Tests cold storage without Python: the codecs, storage in memory and in files, the records of a
// head, the numbers of the schedule, and the kernels that find frozen entries.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "cold/cold_codec.hpp"
#include "cold/cold_head.hpp"
#include "cold/cold_storage.hpp"
#include "decide/freezing.hpp"
#include "platform/file_access.hpp"
#include "temporary_file.hpp"
#include "testing.hpp"

namespace {

using Bytes = std::vector<std::byte>;

// The following tests are about how pages are encoded.

AlignedBytes random_page(const PageLayout& layout, unsigned seed, float size = 1.0f) {
    AlignedBytes page(layout.bytes);
    std::mt19937 random(seed);
    for (int slot = 0; slot < layout.entries; ++slot) {
        std::vector<float> k = random_rows(random, layout.k_dim);
        std::vector<float> v = random_rows(random, layout.v_dim);
        for (float& value : k) value *= size;
        for (float& value : v) value *= size;
        kKernelsPortable.store_k(layout, page.data(), slot, k.data());
        if (!layout.latent) kKernelsPortable.store_v(layout, page.data(), slot, v.data());
        layout.positions(page.data())[slot] = slot;
        layout.importance(page.data())[slot] = 1.0f;
    }
    return page;
}

std::vector<float> k_row(const PageLayout& layout, const std::byte* page, int slot) {
    std::vector<float> row(index(layout.k_dim));
    load_k(layout, page, slot, row.data());
    return row;
}

std::vector<float> v_row(const PageLayout& layout, const std::byte* page, int slot) {
    std::vector<float> row(index(layout.v_dim));
    load_v(layout, page, slot, row.data());
    return row;
}

// Checks that every value differs by at most a share of the largest of its block: half a step of
// the type, and the rounding of the scale and of the store's own type.
void check_close(const std::vector<float>& a, const std::vector<float>& b, float share) {
    for (std::size_t first = 0; first < a.size(); first += kQuantBlock) {
        const std::size_t end = std::min(a.size(), first + kQuantBlock);
        float largest = 0.0f;
        for (std::size_t d = first; d < end; ++d) largest = std::max(largest, std::fabs(a[d]));
        bool close = true;
        for (std::size_t d = first; d < end; ++d)
            close = close && std::fabs(a[d] - b[d]) <= share * largest;
        CHECK(close);
    }
}

// Checks values that were rounded to 4 bits twice, one time after a rotation: each time they are
// off by some 8 % of their root mean square.
void check_alike(const std::vector<float>& a, const std::vector<float>& b) {
    double error = 0.0, size = 0.0;
    for (std::size_t d = 0; d < a.size(); ++d) {
        error += std::pow(double{a[d]} - b[d], 2.0);
        size += std::pow(double{a[d]}, 2.0);
    }
    CHECK(error <= 0.25 * 0.25 * size);
}

void test_as_stored_is_exact(KvType type, bool latent) {
    const PageLayout layout = make_page_layout(type, 40, 24, 32, latent);
    const ColdCodec codec(ColdType::as_stored, layout);
    CHECK(codec.as_stored() && codec.bytes() <= layout.bytes);
    const AlignedBytes page = random_page(layout, 1);
    AlignedBytes packed(codec.bytes()), back(layout.bytes);
    codec.pack(page.data(), packed.data());
    codec.unpack(packed.data(), kKernelsPortable, back.data());
    CHECK(std::memcmp(page.data(), back.data(), layout.position_offset) == 0);
    // One entry is unpacked to another slot.
    AlignedBytes other(layout.bytes);
    codec.unpack(packed.data(), 19, kKernelsPortable, other.data(), 6);
    CHECK(k_row(layout, other.data(), 6) == k_row(layout, page.data(), 19));
    CHECK(v_row(layout, other.data(), 6) == v_row(layout, page.data(), 19));
}

void test_narrower_is_close_and_stays(KvType type, ColdType cold, const KernelTable& kernels,
                                      int dim, float size, bool latent) {
    const PageLayout layout = make_page_layout(type, dim, latent ? dim : 144 - dim, 32, latent);
    const ColdCodec codec(cold, layout);
    CHECK(!codec.as_stored());
    CHECK(type != KvType::f16 && cold == ColdType::q8_0 ? true : codec.bytes() < layout.bytes);
    const AlignedBytes page = random_page(layout, 2, size);
    AlignedBytes packed(codec.bytes()), back(layout.bytes), again(codec.bytes());
    codec.pack(page.data(), packed.data());
    codec.unpack(packed.data(), kernels, back.data());
    // q4_0 clips values with the sign opposite to the largest one: by up to a whole step of an
    // eighth.
    const float of_cold = cold == ColdType::q8_0 ? 0.5f / 127.0f : 1.0f / 8.0f;
    const float of_hot = type == KvType::f16 ? 0.0f : 0.5f / 127.0f;
    const float share = of_cold + of_hot + 0.002f;
    for (int slot = 0; slot < layout.entries; ++slot) {
        check_close(k_row(layout, page.data(), slot), k_row(layout, back.data(), slot), share);
        const auto v = v_row(layout, page.data(), slot), again_v = v_row(layout, back.data(), slot);
        if (layout.rotated) {
            check_alike(v, again_v);
        } else {
            check_close(v, again_v, share);
        }
    }
    if (type != KvType::f16) return;  // Pages of q8_0 would round the values of q4_0 again.
    codec.pack(back.data(), again.data());
    AlignedBytes twice(layout.bytes);
    codec.unpack(again.data(), kernels, twice.data());
    for (int slot = 0; slot < layout.entries; ++slot) {
        check_close(k_row(layout, back.data(), slot), k_row(layout, twice.data(), slot), 0.002f);
        check_close(v_row(layout, back.data(), slot), v_row(layout, twice.data(), slot), 0.002f);
    }
}

void test_codecs() {
    for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl}) {
        for (const bool latent : {false, true}) test_as_stored_is_exact(type, latent);
        for (const ColdType cold : {ColdType::q8_0, ColdType::q4_0})
            for (const KernelTable* kernels : available_kernels())
                for (const int dim : {16, 20, 64, 128})
                    for (const float size : {0.0f, 0.01f, 1.0f, 1000.0f})
                        for (const bool latent : {false, true})
                            test_narrower_is_close_and_stays(type, cold, *kernels, dim, size,
                                                             latent);
    }
}

// The following tests are about where pages are stored.

constexpr std::size_t kBytes = 1000;
constexpr std::array<std::uint64_t, 2> kNonce{11, 22};

Bytes page_of(int number) {
    Bytes page(kBytes);
    std::mt19937 random(static_cast<unsigned>(number));
    for (std::byte& byte : page) byte = static_cast<std::byte>(random());
    return page;
}

bool holds(ColdStorage& storage, std::uint32_t page, const Bytes& expected) {
    Bytes buffer(storage.page_bytes());
    const std::byte* found = storage.read(page, buffer.data());
    return found != nullptr && std::memcmp(found, expected.data(), expected.size()) == 0;
}

void test_pages_come_back(ColdStorage& storage) {
    std::vector<std::uint32_t> pages;
    for (int i = 0; i < 200; ++i) pages.push_back(storage.take());
    CHECK(std::set<std::uint32_t>(pages.begin(), pages.end()).size() == pages.size());
    for (int i = 199; i >= 0; --i) CHECK(storage.write(pages[index(i)], page_of(i).data()));
    for (int i = 0; i < 200; ++i) CHECK(holds(storage, pages[index(i)], page_of(i)));
    storage.release(pages[7]);
    CHECK(storage.take() == pages[7]);  // free pages are used again
    CHECK(storage.write(pages[7], page_of(500).data()));
    CHECK(holds(storage, pages[7], page_of(500)) && holds(storage, pages[8], page_of(8)));
    CHECK(storage.failed() == nullptr);
}

// Checks that reading a page returns null and reports why.
void check_lost(int number, std::uint32_t page, std::array<std::uint64_t, 2> nonce,
                const char* why) {
    FileStorage storage(kBytes, number, nonce);
    Bytes buffer(kBytes);
    CHECK(storage.read(page, buffer.data()) == nullptr);
    CHECK(storage.failed() != nullptr && std::strcmp(storage.failed(), why) == 0);
}

void test_a_file_is_not_trusted() {
    const TemporaryFile file;
    FileStorage storage(kBytes, file.number, kNonce);
    for (int i = 0; i < 3; ++i) CHECK(storage.write(storage.take(), page_of(i).data()));
    const std::size_t stride = kBytes + sizeof(std::uint64_t);
    const auto at = [&](int page, std::size_t byte) {
        return FileStorage::kHeaderBytes + index(page) * stride + byte;
    };
    const char* changed = "does not hold what was written to it";
    for (const std::size_t byte : {std::size_t{0}, std::size_t{31}, kBytes - 1, kBytes + 3}) {
        char value = 0;
        CHECK(read_at(file.number, &value, 1, at(1, byte)));
        for (int bit = 0; bit < 8; ++bit) {
            const char flipped = static_cast<char>(value ^ (1 << bit));
            CHECK(write_at(file.number, &flipped, 1, at(1, byte)));
            check_lost(file.number, 1, kNonce, changed);
        }
        CHECK(write_at(file.number, &value, 1, at(1, byte)));
        CHECK(holds(storage, 1, page_of(1)));
    }
    Bytes other(stride);  // a whole page with its checksum, in the wrong place
    CHECK(read_at(file.number, other.data(), stride, at(0, 0)));
    CHECK(write_at(file.number, other.data(), stride, at(2, 0)));
    check_lost(file.number, 2, kNonce, changed);
    check_lost(file.number, 0, {11, 23}, changed);  // another session wrote the page
    check_lost(file.number, 0, {22, 11}, changed);
    CHECK(storage.failed() == nullptr && holds(storage, 0, page_of(0)));
    CHECK(file.cut_to(at(1, kBytes / 2)));
    check_lost(file.number, 1, kNonce, "cannot be read, or was cut short");
    CHECK(holds(storage, 0, page_of(0)));
}

void test_a_file_that_cannot_be_written() {
    int number = -1;
    {
        const TemporaryFile file;
        number = file.number;
    }
    FileStorage closed(kBytes, number, kNonce);
    bool thrown = false;
    try {
        closed.take();
    } catch (const ColdStorageError& error) {
        thrown = std::strlen(error.what()) > 0;
    }
    CHECK(thrown && closed.file_bytes() == 0);
    CHECK(!closed.write(0, page_of(0).data()));
    CHECK(closed.failed() != nullptr && std::strcmp(closed.failed(), "cannot be written") == 0);
    // A device that is always full must refuse a page, whatever was reserved.
    if (FILE* full = std::fopen("/dev/full", "r+")) {
        FileStorage storage(kBytes, number_of(full), kNonce);
        CHECK(!storage.write(0, page_of(0).data()) && storage.failed() != nullptr);
        std::fclose(full);
    }
}

void test_storage() {
    MemoryStorage memory(kBytes);
    test_pages_come_back(memory);
    CHECK(memory.file_bytes() == 0);
    const TemporaryFile file;
    FileStorage storage(kBytes, file.number, kNonce);
    test_pages_come_back(storage);
    CHECK(storage.file_bytes() == file.bytes());
    test_a_file_is_not_trusted();
    test_a_file_that_cannot_be_written();
}

// The following tests are about the records of a head.

constexpr int kPerPage = 16;

// Returns settings by which nothing decays while it is frozen.
ImportanceSettings settings_of(float expected_lookups) {
    ImportanceSettings settings;
    settings.decay = 1.0f;
    settings.expected_lookups = expected_lookups;
    return settings;
}

struct Frozen {
    explicit Frozen(std::size_t most_pages = 0, ColdType type = ColdType::as_stored)
        : layout(type, make_page_layout(KvType::f16, 24, 40, kPerPage)),
          storage(layout.codec.bytes()),
          head(layout, storage, most_pages, true),
          source(random_page(layout.page, 3)),
          buffer(2 * layout.page.bytes) {}

    int add(std::int32_t position, float importance = 1.0f, std::int32_t due = kNever) {
        head.prepare(1);
        return head.add(source.data(), position % kPerPage,
                        {position, importance, position + 100, due, {}}, importance_settings,
                        kKernelsPortable);
    }

    bool has_rows_of(int record, std::int32_t position) {
        const std::byte* rows = head.read(record / kPerPage, buffer.data());
        if (rows == nullptr) return false;
        AlignedBytes taken(layout.page.bytes);
        head.take(rows, record, kKernelsPortable, taken.data(), 3);
        const int slot = position % kPerPage;
        return k_row(layout.page, taken.data(), 3) == k_row(layout.page, source.data(), slot) &&
               v_row(layout.page, taken.data(), 3) == v_row(layout.page, source.data(), slot);
    }

    ColdLayout layout;
    MemoryStorage storage;
    ColdHead head;
    ImportanceSettings importance_settings = settings_of(0.0f);
    AlignedBytes source;
    AlignedBytes buffer;
};

void test_entries_are_frozen_once() {
    Frozen frozen;
    std::vector<int> records;
    for (int i = 0; i < 100; ++i) records.push_back(frozen.add(i));
    CHECK(frozen.head.n_frozen() == 100 && frozen.head.n_pages() == 7);
    CHECK(frozen.head.stored_pages() == 6 && frozen.head.open_page() == 6);
    for (int i = 0; i < 100; ++i) {
        const ColdRecord record = frozen.head.record(records[index(i)]);
        CHECK(record.position == i && record.frozen() && record.frozen_at == i + 100);
        CHECK(frozen.has_rows_of(records[index(i)], i));
    }
    for (int i = 0; i < 100; i += 3) frozen.head.restore(records[index(i)]);
    CHECK(frozen.head.n_frozen() == 66 && frozen.head.n_frozen(0) == 10);
    CHECK(!frozen.head.record(records[0]).frozen() && frozen.has_rows_of(records[0], 0));
    const std::size_t n_records = index(frozen.head.n_records());
    frozen.head.freeze(records[0], 7.0f, 500, 510, {});
    CHECK(index(frozen.head.n_records()) == n_records && frozen.head.n_frozen() == 67);
    CHECK(frozen.head.record(records[0]).importance == 7.0f);
    CHECK(frozen.head.count_due(509) == 0 && frozen.head.count_due(510) == 1);
}

void test_going_back() {
    Frozen frozen;
    std::vector<int> records;
    for (int i = 0; i < 64; ++i) records.push_back(frozen.add(i, 1.0f, i + 105));
    frozen.head.restore(records[5]);
    frozen.head.truncate(20);
    CHECK(frozen.head.n_frozen() == 19);
    // Timers end as if time had gone back: frozen at 19 for the same five steps.
    CHECK(frozen.head.record(records[4]).frozen_at == 19);
    CHECK(frozen.head.record(records[4]).due == 24);
    CHECK(frozen.head.count_due(23) == 0 && frozen.head.count_due(24) == 19);
    CHECK(frozen.head.record(records[5]).position == 5 && !frozen.head.record(records[5]).frozen());
    for (int i = 0; i < 20; ++i) CHECK(frozen.has_rows_of(records[index(i)], i));
    const int pages = frozen.head.n_pages();
    for (int i = 20; i < 64; ++i) CHECK(frozen.has_rows_of(frozen.add(i), i));
    CHECK(frozen.head.n_pages() <= pages + 1);  // free pages are used again
    CHECK(frozen.head.n_frozen() == 63);
    frozen.head.truncate(0);
    CHECK(frozen.head.n_frozen() == 0 && frozen.head.stored_pages() == 0);
}

// Pages that hold nothing to change are not read, so that nobody notices that such a page is
// damaged.
void test_rewriting_reads_what_changes() {
    const TemporaryFile file;
    const ColdLayout layout(ColdType::as_stored, make_page_layout(KvType::f16, 24, 40, kPerPage));
    FileStorage storage(layout.codec.bytes(), file.number, kNonce);
    ColdHead head(layout, storage, 0, false);
    const AlignedBytes source = random_page(layout.page, 3);
    for (int i = 0; i < 5 * kPerPage; ++i) {
        head.prepare(1);
        head.add(source.data(), i % kPerPage, {i, 1.0f, i, kNever, {}}, settings_of(0.0f),
                 kKernelsPortable);
    }
    // The first full page lies in place 1, as the last check shows.
    const std::size_t place = FileStorage::kHeaderBytes + layout.codec.bytes() + 8;
    const char damage = 17;
    CHECK(write_at(file.number, &damage, 1, place));
    AlignedBytes buffer(2 * layout.page.bytes);
    std::vector<std::int32_t> seen;
    const std::vector<float> zeros(24, 0.0f);
    const auto rewrite = [&](std::int32_t from, std::int32_t to) {
        seen.clear();
        head.rewrite(
            kKernelsPortable, buffer.data(),
            [&](std::int32_t position) { return position >= from && position < to; },
            [&](std::byte* rows, int slot, std::int32_t position) {
                kKernelsPortable.store_k(layout.page, rows, slot, zeros.data());
                seen.push_back(position);
            });
    };
    rewrite(30, 35);
    CHECK(seen == std::vector<std::int32_t>({30, 31, 32, 33, 34}) && storage.failed() == nullptr);
    AlignedBytes taken(layout.page.bytes);
    for (const int record : {29, 30, 34, 35}) {
        const std::byte* rows = head.read(record / kPerPage, buffer.data());
        CHECK(rows != nullptr);
        head.take(rows, record, kKernelsPortable, taken.data(), 3);
        const bool changed = record >= 30 && record < 35;
        CHECK(k_row(layout.page, taken.data(), 3) ==
              (changed ? zeros : k_row(layout.page, source.data(), record % kPerPage)));
    }
    rewrite(70, 100);  // the open page has no place in storage
    CHECK(seen.size() == 10 && storage.failed() == nullptr);
    rewrite(0, 1);
    CHECK(seen.empty() && storage.failed() != nullptr);
}

void test_a_limit_drops_the_least_worthy_page() {
    Frozen frozen(3);
    std::vector<int> records;
    // Pages have importance 5, 1 and 3: the second one is worth least, though it is not the oldest.
    for (int i = 0; i < 64; ++i) {
        const float of_page[]{5.0f, 1.0f, 3.0f, 4.0f};
        records.push_back(frozen.add(i, of_page[i / kPerPage]));
        CHECK(frozen.head.n_dropped() == 0 && frozen.head.dropped_page() == ColdHead::kNone);
    }
    frozen.head.restore(records[17]);  // an entry that is not frozen is not lost
    const int added = frozen.add(64, 9.0f);
    CHECK(frozen.head.dropped_page() == 1 && frozen.head.n_dropped() == 15);
    CHECK(added / kPerPage == 1);  // the number of the dropped page is used again
    CHECK(frozen.head.n_frozen() == 64 - 16 + 1 && frozen.head.stored_pages() == 3);
    std::set<std::int32_t> positions;
    for (int i = 0; i < frozen.head.n_records(); ++i)
        if (frozen.head.frozen(i)) positions.insert(frozen.head.position(i));
    for (int i = 0; i <= 64; ++i) CHECK((positions.count(i) == 1) == (i / kPerPage != 1));
    for (int i = 65; i < 2000; ++i) {
        frozen.add(i, 1.0f);
        CHECK(frozen.head.stored_pages() <= 3);
    }
    CHECK(frozen.head.n_pages() <= 5);
    CHECK(frozen.has_rows_of(records[63], 63) && frozen.has_rows_of(records[0], 0));
}

// Queries gave most to the first page, but the second one is predicted to be looked up.
void test_a_page_is_worth_what_is_predicted_of_it_too() {
    Frozen frozen(2);
    frozen.importance_settings = settings_of(2.0f);
    const float pages[]{PackedImportance(0.5f, 0.01f).packed(),
                        PackedImportance(0.1f, 0.9f).packed(),
                        PackedImportance(0.6f, 0.01f).packed()};
    for (int i = 0; i < 3 * kPerPage; ++i) frozen.add(i, pages[i / kPerPage]);
    frozen.add(3 * kPerPage, pages[2]);
    CHECK(frozen.head.dropped_page() == 0);
}

// The following tests are about the schedule.

void test_the_document_s_numbers() {
    const int expected[]{0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2};
    for (int c = 1; c <= 16; ++c) CHECK(freeze_steps(c, 2.0f) == expected[c - 1]);
    CHECK(freeze_steps(35, 2.0f) == 2 && freeze_steps(36, 2.0f) == 3);
    CHECK(freeze_steps(1, 1.0f) == 1 && freeze_steps(4, 1.0f) == 2);
    CHECK(freeze_steps(1, 0.5f) == 2 && freeze_steps(65535, 2.0f) == 127);
    CHECK(freeze_steps(1, 1e-30f) > 1000000);  // practically for ever
    CHECK(1000000 + freeze_steps(65535, 1e-30f) > 1000000);
}

int detect(Detections& detections, std::int32_t now, int history) {
    detections = detected(detections, now, history);
    return count_detections(detections, now, history);
}

void test_detections_are_counted() {
    Detections all{};
    for (int step = 1; step <= 70000; ++step) CHECK(detect(all, step, 0) == std::min(step, 65535));
    // With a window of 10 positions and one detection at every step, the count rises to 10 and
    // stays there.
    Detections window{};
    for (int now = 0; now < 100; ++now) {
        const int n = detect(window, now, 10);
        CHECK(n <= 10 && n >= std::min(now + 1, 9));
    }
    // Detections before the previous window are forgotten.
    CHECK(detect(window, 120, 10) == 1);
    CHECK(detect(window, 121, 10) == 2);
    CHECK(detect(window, 130, 10) == 1 + 2 * 9 / 10);
    CHECK(detect(window, 139, 10) == 2);
    Detections long_window{};  // no number is too large
    long_window.current = 65535;
    long_window.number = 0;
    CHECK(detect(long_window, 100000, 100000) == 1 + 65534);
}

// The following tests are about kernels.

void test_products(const KernelTable& kernels, KvType type, int dim) {
    const PageLayout layout = make_page_layout(type, dim, 16, 48);
    const AlignedBytes page = random_page(layout, 4);
    std::mt19937 random(5);
    for (int rows = 1; rows <= 9; ++rows) {
        std::vector<float> queries(index(rows * layout.k_stride), 0.0f);
        for (int r = 0; r < rows; ++r) {
            const std::vector<float> row = random_rows(random, dim);
            std::copy(row.begin(), row.end(), queries.begin() + r * layout.k_stride);
        }
        const int stride = layout.entries + 7;
        std::vector<float> out(index(rows * stride), -77.0f);
        kernels.products(layout, page.data(), queries.data(), rows, out.data(), stride);
        bool close = true;
        bool inside = true;
        for (int r = 0; r < rows; ++r) {
            for (int slot = 0; slot < layout.entries; ++slot) {
                const std::vector<float> key = k_row(layout, page.data(), slot);
                double expected = 0.0;
                for (int d = 0; d < dim; ++d)
                    expected += static_cast<double>(key[index(d)]) *
                                static_cast<double>(queries[index(r * layout.k_stride + d)]);
                close = close && std::fabs(static_cast<double>(out[index(r * stride + slot)]) -
                                           expected) < 1e-4;
            }
            for (int slot = layout.entries; slot < stride; ++slot)
                inside = inside && out[index(r * stride + slot)] == -77.0f;
        }
        CHECK(close);
        CHECK(inside);
    }
}

// A sketch is off by at most half a step of every value plus the rounding of f16, and its products
// are exactly those of the sketched values.
void test_sketches(const KernelTable& kernels, KvType type, int dim, float size) {
    const PageLayout layout = make_page_layout(type, dim, 16, 32);
    const AlignedBytes page = random_page(layout, 7, size);
    const KeySketch sketch(layout);
    AlignedBytes bytes(sketch.page_bytes());
    std::vector<float> room(index(kGroupEntries * dim));
    sketch.draw(layout, page.data(), room.data(), bytes.data());
    constexpr int kRows = 5;
    std::mt19937 random(8);
    std::vector<float> queries(index(kRows * layout.k_stride), 0.0f);
    std::vector<float> units(index(layout.k_stride * layout.k_stride), 0.0f);
    for (int r = 0; r < kRows; ++r) {
        const std::vector<float> row = random_rows(random, dim);
        std::copy(row.begin(), row.end(), queries.begin() + r * layout.k_stride);
    }
    for (int d = 0; d < layout.k_stride; ++d) units[index(d * (layout.k_stride + 1))] = 1.0f;
    const int stride = layout.entries + 3;
    std::vector<float> values(index(layout.k_stride * stride), -77.0f);
    std::vector<float> out(index(kRows * stride), -77.0f);
    kernels.sketch_products(sketch, bytes.data(), units.data(), layout.k_stride, values.data(),
                            stride);
    kernels.sketch_products(sketch, bytes.data(), queries.data(), kRows, out.data(), stride);
    bool close = true;
    bool equal = true;
    bool inside = true;
    for (int group = 0; group < layout.entries; group += kGroupEntries) {
        for (int d = 0; d < layout.k_stride; ++d) {
            float low = std::numeric_limits<float>::max();
            float high = -low;
            for (int slot = group; slot < group + kGroupEntries; ++slot) {
                const float key = d < dim ? k_row(layout, page.data(), slot)[index(d)] : 0.0f;
                low = std::min(low, key);
                high = std::max(high, key);
            }
            const float most = 0.5f / 15.0f * (high - low) +
                               0.002f * std::max(std::fabs(low), std::fabs(high)) + 1e-6f;
            for (int slot = group; slot < group + kGroupEntries; ++slot) {
                const float key = d < dim ? k_row(layout, page.data(), slot)[index(d)] : 0.0f;
                close = close && std::fabs(values[index(d * stride + slot)] - key) <= most;
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int slot = 0; slot < stride; ++slot) {
            const float got = out[index(r * stride + slot)];
            if (slot >= layout.entries) {
                inside = inside && got == -77.0f;
                continue;
            }
            double expected = 0.0;
            double terms = 0.0;
            for (int d = 0; d < dim; ++d) {
                const double term = static_cast<double>(values[index(d * stride + slot)]) *
                                    static_cast<double>(queries[index(r * layout.k_stride + d)]);
                expected += term;
                terms += std::fabs(term);
            }
            equal = equal && std::fabs(static_cast<double>(got) - expected) <= 1e-5 * terms + 1e-6;
        }
    }
    CHECK(close);
    CHECK(equal);
    CHECK(inside);
}

void test_log_sum(const KernelTable& kernels) {
    std::mt19937 random(6);
    for (const int n : {1, 2, 7, 8, 9, 15, 16, 17, 100, 1000}) {
        for (const float size : {0.0f, 1.0f, 300.0f}) {
            std::vector<float> logits = random_rows(random, n);
            double sum = 0.0;
            float max = -std::numeric_limits<float>::max();
            for (float& logit : logits) max = std::max(max, logit *= size);
            for (const float logit : logits) sum += std::exp(static_cast<double>(logit - max));
            const double expected = static_cast<double>(max) + std::log(sum);
            CHECK(std::fabs(static_cast<double>(kernels.log_sum(logits.data(), n)) - expected) <
                  1e-5 * std::max(1.0, std::fabs(expected)));
        }
    }
}

}  // namespace

int main() {
    test_codecs();
    test_storage();
    test_entries_are_frozen_once();
    test_going_back();
    test_rewriting_reads_what_changes();
    test_a_limit_drops_the_least_worthy_page();
    test_a_page_is_worth_what_is_predicted_of_it_too();
    test_the_document_s_numbers();
    test_detections_are_counted();
    for (const KernelTable* kernels : available_kernels()) {
        test_log_sum(*kernels);
        for (const KvType type : {KvType::f16, KvType::q8_0, KvType::q8_0_iq4_nl})
            for (const int dim : {16, 20, 33, 64, 128}) {
                test_products(*kernels, type, dim);
                for (const float size : {0.0f, 0.01f, 1.0f, 100.0f})
                    test_sketches(*kernels, type, dim, size);
            }
    }
    return summary();
}
