// Part of kernels.cpp: from the type of K and V that a page says to code that is compiled for it.
#pragma once

#include "page/page_layout.hpp"

namespace entropykv {
namespace {

// A type of K and V as a type.
template <KvType Type>
struct KnownType {
    static constexpr KvType type = Type;
};

// Calls run(KnownType). There is no default: the compiler names every type that is missing here.
template <typename Run>
inline void with_type(KvType type, Run run) {
    switch (type) {
        case KvType::f16: return run(KnownType<KvType::f16>{});
        case KvType::q8_0: return run(KnownType<KvType::q8_0>{});
    }
}

// For the last branch of what is written type by type: a type without one does not compile.
template <KvType Type>
constexpr bool kIsUnknown = false;

}  // namespace
}  // namespace entropykv
