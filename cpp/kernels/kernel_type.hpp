// Part of kernels.cpp: calls code that is compiled for the KV type of a page.
#pragma once

#include "page/page_layout.hpp"

namespace entropykv {
namespace {

// Wraps a KV type in a C++ type.
template <KvType Type>
struct KnownType {
    static constexpr KvType type = Type;
};

// Calls run(KnownType). There is no default branch, so the compiler reports a missing type.
template <typename Run>
inline void with_type(KvType type, Run run) {
    switch (type) {
        case KvType::f16: return run(KnownType<KvType::f16>{});
        case KvType::q8_0: return run(KnownType<KvType::q8_0>{});
    }
}

// Goes into the last branch of code that distinguishes types, so that a type without a branch does
// not compile.
template <KvType Type>
constexpr bool kIsUnknown = false;

}  // namespace
}  // namespace entropykv
