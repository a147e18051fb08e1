// Part of kernels.cpp: the decode kernel, by the type of the entries.
#pragma once

#include "kernels/kernel_decode_f16.hpp"
#include "kernels/kernel_decode_q8.hpp"

namespace entropykv {
namespace {

void decode(const DecodeTask& task) {
    switch (task.entries.layout->type) {
        case KvType::f16: return decode_f16(task);
        case KvType::q8_0: return decode_q8_0(task);
    }
}

}  // namespace
}  // namespace entropykv
