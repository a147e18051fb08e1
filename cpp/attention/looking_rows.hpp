// The queries of a micro-batch that look for frozen entries of a KV head.
#pragma once

#include "attention/call.hpp"

namespace entropykv {

// The last ones of the text, scaled, in the thread's scratch.
QueryRows looking_rows(const Call& call, int head) noexcept;

}  // namespace entropykv
