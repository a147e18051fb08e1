// This library is loaded before all others (LD_PRELOAD). While a test asks for it, the C++ library
// can start no thread, as on a machine that has none left. Threads of C, such as ggml's, are
// started all the same.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace {

std::atomic<bool> failing{false};
std::atomic<int> failed{0};

bool is_of_cpp(void* caller) {
    Dl_info info;
    if (dladdr(caller, &info) == 0) return false;
    return std::strstr(info.dli_fname, "libstdc++") != nullptr ||
           std::strstr(info.dli_fname, "_core") != nullptr;
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
    if (failing && is_of_cpp(__builtin_return_address(0))) {
        ++failed;
        return EAGAIN;
    }
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    return create(thread, attributes, start, argument);
}

extern "C" void start_no_threads(bool on) { failing = on; }
extern "C" int threads_not_started() { return failed; }
