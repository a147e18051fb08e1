#include "platform/mapped_file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>

namespace entropykv {
namespace {

// Holds the addresses that belong to files. A handler of signals reads them, so there is no lock.
struct Watched {
    std::atomic<bool> taken{false};
    std::atomic<bool> cut{false};  // a page behind the end of the file was read
    std::atomic<std::uintptr_t> begin{0};
    std::atomic<std::uintptr_t> end{0};
};
std::array<Watched, MappedFile::kMost> watched;
std::size_t page_bytes = 0;  // set before the first range is watched
struct sigaction earlier_action{};

// The system sends SIGBUS where a mapped page lies behind the end of a file that was shortened.
// Puts a zeroed page there, so that the process goes on until has_changed() is asked. All functions
// that are called here are allowed in a handler.
void on_bus_error(int number, siginfo_t* info, void*) {
    const int error = errno;
    const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (Watched& range : watched) {
        if (info->si_code <= 0) break;  // another process has sent the signal
        if (at < range.begin.load() || at >= range.end.load()) continue;
        void* page = reinterpret_cast<void*>(at / page_bytes * page_bytes);
        if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
                 -1, 0) == MAP_FAILED)
            break;
        range.cut = true;
        errno = error;
        return;
    }
    // Nothing was mended: the earlier handler gets the signal when the instruction is tried again.
    sigaction(SIGBUS, &earlier_action, nullptr);
    if (info->si_code <= 0) raise(number);
    errno = error;
}

void handle_bus_errors() {
    static std::once_flag once;
    std::call_once(once, [] {
        page_bytes = system_page_bytes();
        struct sigaction action{};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, &earlier_action);
    });
}

// Takes a free one of the ranges that are watched, and returns its number; -1: all are taken.
int watch() {
    for (int i = 0; i < MappedFile::kMost; ++i)
        if (!watched[static_cast<std::size_t>(i)].taken.exchange(true)) return i;
    return -1;
}

void set_range(Watched& range, const std::byte* data, std::size_t bytes) {
    range.cut = false;
    range.begin = reinterpret_cast<std::uintptr_t>(data);
    range.end = reinterpret_cast<std::uintptr_t>(data) + bytes;
}

void stop_watching(int number) {
    Watched& range = watched[static_cast<std::size_t>(number)];
    range.end = 0;
    range.begin = 0;
    range.taken = false;
}

}  // namespace

MappedFile::Version MappedFile::version_of(int file) noexcept {
    struct stat status{};
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return {};
#if defined(__APPLE__)
    const timespec& time = status.st_mtimespec;
#else
    const timespec& time = status.st_mtim;
#endif
    return {static_cast<std::int64_t>(status.st_size), static_cast<std::int64_t>(time.tv_sec),
            static_cast<std::int64_t>(time.tv_nsec)};
}

std::shared_ptr<MappedFile> MappedFile::map(int file, std::size_t offset, std::size_t bytes) {
    std::shared_ptr<MappedFile> made(new MappedFile());
    made->version_ = version_of(file);
    const std::int64_t size = made->version_.size;
    if (bytes == 0 || size < 0 || static_cast<std::size_t>(size) < bytes ||
        static_cast<std::size_t>(size) - bytes < offset)
        return nullptr;
    handle_bus_errors();
    made->watch_ = watch();
    made->file_ = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (made->watch_ < 0 || made->file_ < 0) return nullptr;
    made->skipped_ = offset % page_bytes;
    made->bytes_ = bytes;
    const std::size_t total = (made->skipped_ + bytes + page_bytes - 1) / page_bytes * page_bytes;
    void* start = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE, made->file_,
                       static_cast<off_t>(offset - made->skipped_));
    if (start == MAP_FAILED) return nullptr;
    made->memory_ = MappedMemory(static_cast<std::byte*>(start), total);
    set_range(watched[static_cast<std::size_t>(made->watch_)], made->memory_.data(), total);
    return made;
}

void MappedFile::forget_file() noexcept {
    if (watch_ >= 0) stop_watching(watch_);
    if (file_ >= 0) close(file_);
    watch_ = file_ = -1;
}

MappedFile::~MappedFile() { forget_file(); }

bool MappedFile::has_changed() noexcept {
    if (file_ < 0) return false;
    changed_ = changed_ || watched[static_cast<std::size_t>(watch_)].cut ||
               !(version_of(file_) == version_);
    return changed_;
}

void MappedFile::let_go() noexcept {
    if (file_ < 0) return;
    if (mmap(memory_.data(), memory_.size(), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        return;  // The file stays mapped; this is tried again the next time its pages are free.
#if defined(MADV_HUGEPAGE)
    madvise(memory_.data(), memory_.size(), MADV_HUGEPAGE);
#endif
    forget_file();
}

}  // namespace entropykv
