// Tests the threads that share the host's decisions of the device store, those that help with
// products, and the one on which decisions are made while a device computes.
#include "platform/worker_threads.hpp"

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "platform/background_thread.hpp"
#include "platform/helper_threads.hpp"
#include "platform/own_process.hpp"
#include "testing.hpp"

namespace {

void test_every_piece_is_done_once() {
    for (const int n_threads : {-1, 0, 1, 2, 7}) {
        WorkerThreads threads(n_threads);
        CHECK(threads.n_threads() == (n_threads > 0 ? n_threads : 1));
        for (const int n : {0, 1, 3, 1000, 1000, 1}) {
            std::vector<std::atomic<int>> done(static_cast<std::size_t>(n));
            std::atomic<bool> known{true};
            threads.run(n, [&](int piece, int thread) {
                ++done[static_cast<std::size_t>(piece)];
                if (thread < 0 || thread >= threads.n_threads()) known = false;
            });
            for (const std::atomic<int>& times : done) CHECK(times == 1);
            CHECK(known);
        }
    }
}

// Workspaces belong to a thread, so no two pieces may have the same one at a time.
void test_a_thread_does_one_piece_at_a_time() {
    WorkerThreads threads(4);
    std::vector<std::atomic<int>> busy(4);
    std::atomic<int> shared{0};
    threads.run(2000, [&](int, int thread) {
        std::atomic<int>& own = busy[static_cast<std::size_t>(thread)];
        if (++own > 1) ++shared;
        --own;
    });
    CHECK(shared == 0);
}

void test_an_error_ends_no_thread_and_reaches_who_asked() {
    WorkerThreads threads(3);
    for (int round = 0; round < 3; ++round) {
        std::atomic<int> done{0};
        bool thrown = false;
        try {
            threads.run(100, [&](int piece, int) {
                ++done;
                if (piece % 10 == 3) throw std::runtime_error("a piece failed");
            });
        } catch (const std::runtime_error&) {
            thrown = true;
        }
        CHECK(thrown);
        CHECK(done == 100);
        threads.run(10, [&](int, int) { ++done; });
        CHECK(done == 110);
    }
}

void sleep_for(int milliseconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void test_helpers_work_until_they_rest() {
    std::vector<std::atomic<int>> helped(3);
    std::atomic<int> within{0};
    std::atomic<bool> there_is_work{true};
    {
        HelperThreads helpers([&](int helper) {
            ++within;
            if (there_is_work) ++helped[static_cast<std::size_t>(helper)];
            --within;
            return there_is_work.load();
        });
        helpers.rest();  // No helper runs yet.
        for (const int n : {3, 1, 2}) {
            for (std::atomic<int>& times : helped) times = 0;
            there_is_work = true;
            helpers.wake(n);
            for (int i = 0; i < 2000; ++i) {
                bool all = true;
                for (int h = 0; h < n; ++h) all = all && helped[static_cast<std::size_t>(h)] > 10;
                if (all) break;
                sleep_for(5);
            }
            for (int h = 0; h < 3; ++h)
                CHECK((helped[static_cast<std::size_t>(h)] > 10) == (h < n));
            there_is_work = false;
            sleep_for(20);  // The helpers sleep, look again and sleep.
            there_is_work = true;
            helpers.rest();
            CHECK(within == 0);
            const int before = helped[0];
            sleep_for(20);
            CHECK(helped[0] == before);
        }
        helpers.wake(3);  // The helpers end while they work.
    }
    CHECK(within == 0);
}

void test_work_goes_on_while_who_asked_does_something_else() {
    BackgroundThread thread;
    thread.wait();
    for (int round = 0; round < 100; ++round) {
        std::promise<void> may_end;
        std::atomic<bool> ended{false};
        thread.start([&] {
            may_end.get_future().wait();
            ended = true;
        });
        CHECK(!ended);
        may_end.set_value();
        thread.wait();
        CHECK(ended);
        thread.wait();
    }
}

void test_work_is_done_in_order_and_before_its_thread_ends() {
    std::vector<int> done;
    {
        BackgroundThread thread;
        for (int i = 0; i < 5; ++i) thread.start([&done, i] { done.push_back(i); });
    }
    CHECK((done == std::vector<int>{0, 1, 2, 3, 4}));
}

void test_an_error_reaches_who_waits_once() {
    BackgroundThread thread;
    thread.start([] { throw std::runtime_error("the work failed"); });
    bool thrown = false;
    try {
        thread.wait();
    } catch (const std::runtime_error&) {
        thrown = true;
    }
    CHECK(thrown);
    thread.wait();
    bool done = false;
    thread.start([&] { done = true; });
    thread.wait();
    CHECK(done);
}

// The child of a fork has none of these threads, and must end nevertheless.
void test_a_forked_process_waits_for_no_thread() {
#if !defined(_WIN32)
    auto helpers = std::make_unique<OfOwnProcess<HelperThreads>>([](int) { return false; });
    helpers->get().wake(2);
    sleep_for(20);
    helpers->get().rest();
    auto workers = std::make_unique<OfOwnProcess<WorkerThreads>>(3);
    workers->get().run(6, [](int, int) {});
    auto background = std::make_unique<OfOwnProcess<BackgroundThread>>();
    background->get().start([] {});
    background->get().wait();
    sleep_for(20);  // All of them wait to be woken.
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        bool refused = false;
        try {
            workers->get().run(6, [](int, int) {});
        } catch (const std::runtime_error&) {
            refused = true;
        }
        helpers.reset();
        workers.reset();
        background.reset();
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
#endif
}

}  // namespace

int main() {
    test_work_goes_on_while_who_asked_does_something_else();
    test_work_is_done_in_order_and_before_its_thread_ends();
    test_an_error_reaches_who_waits_once();
    test_every_piece_is_done_once();
    test_a_thread_does_one_piece_at_a_time();
    test_an_error_ends_no_thread_and_reaches_who_asked();
    test_helpers_work_until_they_rest();
    test_a_forked_process_waits_for_no_thread();
    return summary();
}
