// Threads that help where there is work, and for which nobody waits: another process may take their
// cores at any time.
#pragma once

#include <functional>
#include <memory>

namespace entropykv {

class HelperThreads {
public:
    // help(helper) does a piece of work and returns true, or returns false if there is none. It
    // must not throw.
    explicit HelperThreads(std::function<bool(int helper)> help);
    // In a process that was forked, where there are no such threads, nothing is waited for.
    ~HelperThreads();
    HelperThreads(const HelperThreads&) = delete;
    HelperThreads& operator=(const HelperThreads&) = delete;

    // Lets helpers [0, n) look for work until rest(). If the system has no more threads, there are
    // fewer.
    void wake(int n);
    // Stops the search for work. Returns when no helper is within help().
    void rest() noexcept;

private:
    class Team;
    std::unique_ptr<Team> team_;
    long process_;
};

}  // namespace entropykv
