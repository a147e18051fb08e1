// Lets clang-cl read the C++ library of LLVM over the C headers of mingw-w64, because the headers
// of Microsoft may not be shipped. Included before every source by parse_with_clang_cl.py.
#pragma once

// These lines are what the build of that library writes into its __config_site.
#define _LIBCPP_ABI_VERSION 1
#define _LIBCPP_ABI_NAMESPACE __1
#define _LIBCPP_HARDENING_MODE_DEFAULT 2
#define _LIBCPP_ASSERTION_SEMANTIC_DEFAULT 2
#define _LIBCPP_HAS_FILESYSTEM 1
#define _LIBCPP_HAS_LOCALIZATION 1
#define _LIBCPP_HAS_MONOTONIC_CLOCK 1
#define _LIBCPP_HAS_MUSL_LIBC 0
#define _LIBCPP_HAS_RANDOM_DEVICE 1
#define _LIBCPP_HAS_TERMINAL 1
#define _LIBCPP_HAS_THREADS 1
#define _LIBCPP_HAS_THREAD_API_EXTERNAL 0
#define _LIBCPP_HAS_THREAD_API_PTHREAD 0
#define _LIBCPP_HAS_THREAD_API_WIN32 1
#define _LIBCPP_HAS_TIME_ZONE_DATABASE 0
#define _LIBCPP_HAS_UNICODE 1
#define _LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS 0
#define _LIBCPP_HAS_WIDE_CHARACTERS 1
#define _LIBCPP_INSTRUMENTED_WITH_ASAN 0
#define _LIBCPP_LIBC_NEWLIB 0
#define _LIBCPP_NO_VCRUNTIME
#define _LIBCPP_PSTL_BACKEND_SERIAL

// Microsoft's C headers declare these, and those of mingw-w64 do not.
#include <locale.h>
extern "C" long double _strtold_l(const char*, char**, _locale_t);
#include <math.h>
using std::__math::isfinite;
using std::__math::isgreater;
using std::__math::isgreaterequal;
using std::__math::isinf;
using std::__math::isless;
using std::__math::islessequal;
using std::__math::islessgreater;
using std::__math::isnan;
using std::__math::isnormal;
using std::__math::isunordered;
using std::__math::signbit;
