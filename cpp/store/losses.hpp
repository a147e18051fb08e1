// What heads would have lost, had they kept less.
#pragma once

#include <vector>

#include "store/store_parts.hpp"

namespace entropykv {

// Has every micro-batch from the next one on measure what each head would have lost, had it kept so
// many entries beyond the protected ones; knots: ascending from 0, none: off.
void measure_losses(StoreParts& parts, const std::vector<int>& knots);

// Of the last micro-batch that measured: sums of the scores of what is not kept, relative to the
// squared outputs of the head where scores are squares; [KV head of all layers][knot]. of_held:
// without what was dropped before.
std::vector<double> last_losses(const StoreParts& parts, bool of_held);

}  // namespace entropykv
