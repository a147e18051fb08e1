// How many keys are compared with each other: a number alone, since kernels are compiled for
// several instruction sets and must not bring inline functions along.
#pragma once

namespace entropykv {

constexpr int kContest = 512;

}  // namespace entropykv
