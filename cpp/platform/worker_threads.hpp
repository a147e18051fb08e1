// Runs pieces of work on threads that wait for it, and on the thread that asks. It is meant for
// work outside of llama.cpp's graphs; inside of a graph, ggml's threads work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace entropykv {

class WorkerThreads {
public:
    // n_threads: how many work, the thread that asks included. Threads are made when there is work
    // for them.
    explicit WorkerThreads(int n_threads) : n_threads_(n_threads > 0 ? n_threads : 1) {}
    ~WorkerThreads();
    WorkerThreads(const WorkerThreads&) = delete;
    WorkerThreads& operator=(const WorkerThreads&) = delete;

    int n_threads() const { return n_threads_; }
    // Calls work(piece, thread) for n pieces, each once, in any order; returns when all are done.
    // Only one thread may ask at a time. Throws the first error of a piece after all have ended,
    // or std::system_error, before any has begun, if the system has no more threads.
    void run(int n, const std::function<void(int piece, int thread)>& work);

private:
    void start();
    void serve(int thread);
    void take_pieces(int thread) noexcept;

    int n_threads_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable begins_;
    std::condition_variable ends_;
    const std::function<void(int, int)>* work_ = nullptr;
    int n_ = 0;
    std::atomic<int> next_{0};
    int working_ = 0;      // threads that have not ended this run
    unsigned number_ = 0;  // counts the runs
    bool closing_ = false;
    std::exception_ptr error_;  // the first error of this run
};

}  // namespace entropykv
