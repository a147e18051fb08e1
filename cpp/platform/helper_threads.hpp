// Holds threads that take work while there is some. No work depends on them: another process may
// take their cores at any time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace entropykv {

class HelperThreads {
public:
    // help(helper) does a piece of work and returns true, or returns false if there is none. It
    // must not throw.
    explicit HelperThreads(std::function<bool(int helper)> help) : help_(std::move(help)) {}
    ~HelperThreads();
    HelperThreads(const HelperThreads&) = delete;
    HelperThreads& operator=(const HelperThreads&) = delete;

    // Lets helpers [0, n) look for work until rest(). If the system has no more threads, there are
    // fewer.
    void wake(int n);
    // Stops the search for work. Returns when no helper is within help().
    void rest() noexcept;

private:
    void serve(int helper) noexcept;
    bool help_once(int helper, std::atomic<bool>& inside) noexcept;

    std::function<bool(int)> help_;
    std::deque<std::thread> threads_;
    std::deque<std::atomic<bool>> inside_;  // whether a helper is within help()
    std::atomic<int> awake_{0};
    std::mutex mutex_;
    std::condition_variable begins_;
    bool closing_ = false;
};

}  // namespace entropykv
