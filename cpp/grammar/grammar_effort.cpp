#include "grammar/grammar_effort.hpp"

#include <stdexcept>

namespace entropykv {

void GrammarEffort::look_up() {
    next_ = done_ + kBetweenPolls;
    if (poll_) poll_();
    if (done_ > most_work_)
        throw std::length_error(
            "it is too ambiguous: finding out what may come next takes too long; let alternatives "
            "begin with different characters");
}

}  // namespace entropykv
