// Registers grammars, and the matcher that follows an answer through one.
#include "bind/register.hpp"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "grammar/grammar_matcher.hpp"
#include "grammar/grammar_parser.hpp"
#include "llama/vocabulary.hpp"

namespace entropykv::bind {

namespace {

using Trie = std::shared_ptr<const TokenTrie>;

// Searches run without the GIL; this takes it to ask Python whether to continue.
std::function<void()> with_gil(py::function poll) {
    const auto held = std::make_shared<py::function>(std::move(poll));
    return [held] {
        const py::gil_scoped_acquire acquire;
        (*held)();
    };
}

}  // namespace

void register_grammar(py::module_& m) {
    py::class_<TokenTrie, std::shared_ptr<TokenTrie>>(m, "TokenTrie")
        .def(py::init<std::vector<std::string>, std::vector<bool>>(), py::arg("texts"),
             py::arg("ends"))
        .def_static(
            "of_vocabulary",
            [](std::uintptr_t vocabulary) {
                const py::gil_scoped_release release;
                return std::const_pointer_cast<TokenTrie>(
                    read_token_texts(reinterpret_cast<const llama_vocab*>(vocabulary)));
            },
            py::arg("vocabulary"))
        .def_property_readonly("n_tokens", &TokenTrie::n_tokens);
    py::class_<GrammarLimits>(m, "GrammarLimits")
        .def(py::init<>())
        .def_readwrite("most_symbols", &GrammarLimits::most_symbols)
        .def_readwrite("most_repeats", &GrammarLimits::most_repeats)
        .def_readwrite("most_stacks", &GrammarLimits::most_stacks)
        .def_readwrite("most_work", &GrammarLimits::most_work)
        .def_readwrite("most_kept", &GrammarLimits::most_kept);
    py::class_<GrammarMatcher>(m, "GrammarMatcher")
        .def(py::init([](const std::string& text, const std::string& root, const Trie& trie,
                         const GrammarLimits& limits, const FindToken& find_token,
                         py::function poll) {
                 const std::function<void()> poll_with_gil = with_gil(std::move(poll));
                 const auto grammar = std::make_shared<const GrammarRules>(
                     parse_grammar(text, root, limits, find_token));
                 const py::gil_scoped_release release;
                 return std::make_unique<GrammarMatcher>(grammar, trie, limits, poll_with_gil);
             }),
             py::arg("text"), py::arg("root"), py::arg("trie"), py::arg("limits"),
             py::arg("find_token"), py::arg("poll"))
        .def(
            "apply",
            [](GrammarMatcher& self, std::uintptr_t candidates, std::size_t n_candidates) {
                self.apply(reinterpret_cast<TokenCandidate*>(candidates), n_candidates);
            },
            py::arg("candidates"), py::arg("n_candidates"),
            py::call_guard<py::gil_scoped_release>())
        .def("accept", &GrammarMatcher::accept, py::arg("token"),
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("may_end", &GrammarMatcher::may_end);
}

}  // namespace entropykv::bind
