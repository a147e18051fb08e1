// Keeps what only the process that made it can use, such as threads, which a fork does not copy.
#pragma once

#if !defined(_WIN32)
#include <unistd.h>
#endif

#include <memory>
#include <stdexcept>
#include <utility>

namespace entropykv {

// Returns a number of the calling process. Windows has no forks, so there it is always the same.
inline long this_process() noexcept {
#if defined(_WIN32)
    return 0;
#else
    return static_cast<long>(getpid());
#endif
}

template <class T>
class OfOwnProcess {
public:
    template <class... Arguments>
    explicit OfOwnProcess(Arguments&&... arguments)
        : owned_(std::make_unique<T>(std::forward<Arguments>(arguments)...)) {}
    // To join threads that do not exist would take for ever, as would destroying what they wait on.
    // So a process that was forked destroys nothing.
    ~OfOwnProcess() {
        if (is_forked()) static_cast<void>(owned_.release());
    }
    OfOwnProcess(const OfOwnProcess&) = delete;
    OfOwnProcess& operator=(const OfOwnProcess&) = delete;

    bool is_forked() const noexcept { return process_ != this_process(); }
    // Throws std::runtime_error in a process that was forked.
    T& get() const {
        if (is_forked())
            throw std::runtime_error(
                "this process was forked, and has none of the threads of its parent; load the "
                "model here, or start processes by spawn");
        return *owned_;
    }
    T* operator->() const noexcept { return owned_.get(); }

private:
    std::unique_ptr<T> owned_;
    long process_ = this_process();
};

}  // namespace entropykv
