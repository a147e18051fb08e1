#include "platform/background_thread.hpp"

#include <utility>

namespace entropykv {

BackgroundThread::~BackgroundThread() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    begins_.notify_one();
    if (thread_.joinable()) thread_.join();
}

void BackgroundThread::start(std::function<void()> work) {
    wait();
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        work_ = std::move(work);
    }
    begins_.notify_one();
}

void BackgroundThread::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    ends_.wait(lock, [this] { return !work_; });
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Work that was begun is done before the thread ends.
void BackgroundThread::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        begins_.wait(lock, [this] { return closing_ || work_; });
        if (!work_) return;
        lock.unlock();
        std::exception_ptr error;
        try {
            work_();
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        error_ = error;
        work_ = nullptr;
        ends_.notify_one();
    }
}

}  // namespace entropykv
