#include "platform/worker_threads.hpp"

namespace entropykv {

WorkerThreads::~WorkerThreads() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    begins_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::start() {
    while (static_cast<int>(threads_.size()) < n_threads_ - 1) {
        const int thread = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, thread] { serve(thread); });
    }
}

void WorkerThreads::run(int n, const std::function<void(int, int)>& work) {
    start();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        n_ = n;
        next_ = 0;
        working_ = static_cast<int>(threads_.size());
        error_ = nullptr;
        ++number_;
    }
    begins_.notify_all();
    take_pieces(0);
    std::unique_lock<std::mutex> lock(mutex_);
    ends_.wait(lock, [this] { return working_ == 0; });
    if (error_ != nullptr) std::rethrow_exception(error_);
}

void WorkerThreads::serve(int thread) {
    unsigned served = 0;
    while (true) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            begins_.wait(lock, [&] { return closing_ || number_ != served; });
            if (closing_) return;
            served = number_;
        }
        take_pieces(thread);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (--working_ == 0) ends_.notify_one();
        }
    }
}

void WorkerThreads::take_pieces(int thread) noexcept {
    for (int piece = next_++; piece < n_; piece = next_++) {
        try {
            (*work_)(piece, thread);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (error_ == nullptr) error_ = std::current_exception();
        }
    }
}

}  // namespace entropykv
