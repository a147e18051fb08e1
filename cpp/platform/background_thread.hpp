// Runs one piece of work at a time on a thread of its own, while the thread that asks goes on.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace entropykv {

class BackgroundThread {
public:
    BackgroundThread() = default;
    ~BackgroundThread();
    BackgroundThread(const BackgroundThread&) = delete;
    BackgroundThread& operator=(const BackgroundThread&) = delete;

    // Begins work after the work before it has ended; throws what that has thrown, and then begins
    // nothing. The first call makes the thread, and may throw std::system_error.
    void start(std::function<void()> work);
    // Returns when the work that was begun, if any, has ended. Throws what it has thrown.
    void wait();

private:
    void serve();

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable begins_;
    std::condition_variable ends_;
    std::function<void()> work_;  // empty: there is nothing to do
    bool closing_ = false;
    std::exception_ptr error_;
};

}  // namespace entropykv
