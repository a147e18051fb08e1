#include "platform/helper_threads.hpp"

#include <system_error>

#include "platform/relax.hpp"

namespace entropykv {

HelperThreads::~HelperThreads() {
    rest();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    begins_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void HelperThreads::wake(int n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<int>(threads_.size()) < n) {
        const int helper = static_cast<int>(threads_.size());
        if (static_cast<int>(inside_.size()) == helper) inside_.emplace_back(false);
        try {
            threads_.emplace_back([this, helper] { serve(helper); });
        } catch (const std::system_error&) {
            break;
        }
    }
    awake_.store(n, std::memory_order_seq_cst);
    begins_.notify_all();
}

void HelperThreads::rest() noexcept {
    // A helper sets `inside` and then reads awake_, and this function sets awake_ and then reads
    // `inside`: so at least one of the two sees what the other has set.
    awake_.store(0, std::memory_order_seq_cst);
    for (const std::atomic<bool>& inside : inside_)
        wait_until([&] { return !inside.load(std::memory_order_seq_cst); });
}

void HelperThreads::serve(int helper) noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    std::atomic<bool>& inside = inside_[static_cast<std::size_t>(helper)];
    while (true) {
        begins_.wait(lock, [&] { return closing_ || helper < awake_.load(); });
        if (closing_) return;
        lock.unlock();
        for (int idle = 0; helper < awake_.load(std::memory_order_relaxed);) {
            if (help_once(helper, inside)) {
                idle = 0;
            } else if (idle < kMostSpins) {
                relax();
                ++idle;
            } else {
                nap();
            }
        }
        lock.lock();
    }
}

bool HelperThreads::help_once(int helper, std::atomic<bool>& inside) noexcept {
    inside.store(true, std::memory_order_seq_cst);
    const bool helped = helper < awake_.load(std::memory_order_seq_cst) && help_(helper);
    inside.store(false, std::memory_order_release);
    return helped;
}

}  // namespace entropykv
