// Threads that help where there is work, and for which nobody waits: another process may take their
// cores at any time.
#pragma once

#include <functional>

#include "platform/own_process.hpp"

namespace entropykv {

class HelperThreads {
public:
    // help(helper) does a piece of work and returns true, or returns false if there is none. It
    // must not throw.
    explicit HelperThreads(std::function<bool(int helper)> help);
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
    OfOwnProcess<Team> team_;
};

}  // namespace entropykv
