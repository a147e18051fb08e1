// What queries are observed to give: a name alone, since kernels are compiled for several
// instruction sets and must not bring inline functions along.
#pragma once

namespace entropykv {

// What a query gives to an entry that it sees; to one that it does not see: 0. What several give is
// added up, but of largest_probability, of which the largest counts.
enum class Statistic {
    squared_probability,
    probability,
    product,  // |logit|
    largest_probability,
};

}  // namespace entropykv
