"""llama.cpp's grammars allow the right texts; wrong ones are refused, and none takes long."""

from __future__ import annotations

import functools
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import llama_grammar

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.lexemes import lark_of
from entropykv.errors import SettingsError
from tests.support.constraints import byte_texts, longest_step, takes
from tests.support.grammars import AMBIGUOUS, EMPTY, NONE, Words, bomb, either, repeat, then


def sets_of_words(letters: tuple[str, ...] = ("a", "b", "ab", "bc")) -> st.SearchStrategy[Words]:
    single = st.sampled_from(letters).map(lambda each: Words("letters", (each,)))
    few = [(0, 1), (0, None), (1, None), (2, 3), (0, 2), (2, 2), (1, 4)]
    counts = st.sampled_from([*few, (0, 7), (5, 9), (6, None), (5, 5)])
    return st.recursive(
        single | st.just(EMPTY),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: then(*pair)),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: either(*parts)),
            st.tuples(inner, counts).map(lambda pair: repeat(pair[0], *pair[1])),
        ),
        max_leaves=6,
    )


WORDS = ["".join(word) for n in range(6) for word in itertools.product("abc", repeat=n)]


@settings(max_examples=60)
@given(words=sets_of_words())
def test_a_regular_grammar_allows_the_words_of_its_derivatives(words: Words) -> None:
    expected = [words.has(word) for word in WORDS]
    assert takes(Constraint.gbnf(f"root ::= {words.gbnf()}"), *WORDS) == expected


@settings(max_examples=100)
@given(first=sets_of_words(), second=sets_of_words(), inner=sets_of_words())
def test_lexemes_never_take_what_belongs_to_the_next_ones(
    first: Words, second: Words, inner: Words
) -> None:
    """Lexer tokens never take what belongs to the next part, in words first^n inner second^n."""
    if NONE in (first, second, inner):
        return
    rules = f"root ::= one root two | in\none ::= {first.gbnf()}\ntwo ::= {second.gbnf()}\n"
    constraint = Constraint.gbnf(f"{rules}in ::= {inner.gbnf()}")

    @functools.cache
    def has(word: str) -> bool:
        if inner.has(word):
            return True
        cuts = itertools.combinations_with_replacement(range(len(word) + 1), 2)
        return any(
            first.has(word[:i]) and second.has(word[j:]) and has(word[i:j])
            for i, j in cuts
            if j - i < len(word)
        )

    words = WORDS[:200:2]
    assert takes(constraint, *words) == [has(word) for word in words]


NESTED = 'root ::= "(" root ")" root | "[" [a-c]+ "]" | # nothing\n'
SUMS = llama_grammar.ARITHMETIC_GBNF


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (NESTED, ["", "()", "([a])[bc]", "(((())))"], ["(", "[]", "([a)]"]),
        ('root ::= "a"{2}', ["aa"], ["", "a", "aaa"]),
        ('root ::= "a"{5,7} "ab"{6,}', ["a" * 5 + "ab" * 6, "a" * 7 + "ab" * 99], ["a" * 8, "ab"]),
        ('root ::= ("a"? "b"?){0,9} "c"', ["c", "abc", "ab" * 9 + "c"], ["ab" * 10 + "c"]),
        ('root ::= (("a"{2} | "b"){1,2} "-"){2}', ["aa-b-", "baa-bb-"], ["a-b-", "aa-"]),
        ('root ::= ("a" | "b"\n | "c")+?', ["", "a", "cab"], ["d"]),
        (r'root ::= [^\x00-\x60\[] "\u00e9\"\U0001F600"', ['aé"😀', 'éé"😀'], ['Aé"😀', 'a"']),
        ('root ::= other-1  # a "x"\n# b\nother-1 ::= .\r\n', ["é", "\n"], ["", "ab"]),
        ('root ::= [a-] "-"', ["a-", "--"], ["b-"]),
        (r'root ::= [\]\-\\/&~] "/*"', ["]/*", "-/*", "\\/*", "//*", "&/*"], ["a/*"]),
        ('root ::= ("a"? ("b"*)*)* "c"', ["c", "abbac"], ["ab"]),
        ('root ::= x "c"\nx ::= x | "a"', ["ac"], ["c", "aac"]),
        ('root ::= root "+" [0-9] | [0-9]', ["1", "1+2+3"], ["", "1+", "+1"]),
        (SUMS, ["a=1\n", "a+b\n= 2 \n\n", "(a)=b1_\nx=3\n"], ["a=1", "a=\n", "=1\n"]),
        ('root ::= w+\nw ::= "<" w ">" | [a-z]* "end"', ["end", "sendend", "<friend>"], ["en"]),
        ('root ::= x\nx ::= "(" x ")" | "abx" | [a-c] [a-c] "y"', ["abx", "(aby)"], ["abz"]),
        ('root ::= "" | "(" root ")"', ["", "(())"], ["("]),
        ("root ::= [\\u0e00-\\u0e7f]{1,3}", ["ก", "กขค"], ["", "a", "กขคง"]),
        (llama_grammar.JSON_GBNF, ['{"a": [1, -2.5e3, "b\\n"]}', "{}"], ["[1]", '{"a":}', "{"]),
    ],
)
def test_texts_in_a_grammar_and_others(grammar: str, inside: list[str], outside: list[str]) -> None:
    constraint = Constraint.gbnf(grammar)
    assert takes(constraint, *inside) == [True] * len(inside)
    assert takes(constraint, *outside) == [False] * len(outside)


def test_tokens_are_named_by_their_text_or_number() -> None:
    tokens = {"<think>": 7, "</think>": 8}
    rules = 'root ::= <think> !</think>* </think> "a" <[1000]> !<[13]>'
    lark = lark_of(rules, "root", tokens.get, ends=[5])
    assert all(each in lark for each in ("<[7]>", "<[^5,8]>", "<[8]>", "<[1000]>", "<[^5,13]>"))
    constraint = Constraint.gbnf("root ::= <[97]> !<[97]> .")
    assert takes(constraint, "abc", "aac", "bbc") == [True, False, False]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= (", "line 1: a group is not closed"),
        ('root ::= "a"\n\nother "b"', "line 3: ::= is expected"),
        ('root ::= "a" )', "the end of the line"),
        ('root ::= "a', "a quote or a bracket is not closed"),
        ("root ::= *", "nothing before a repetition"),
        ('root ::= "a"{3,2}', "below its first"),
        ('root ::= "a"{0,99999999999999999999999}', "repeats more than"),
        ('root ::= "\\q"', "a backslash stands before"),
        ("root ::= [\\u12]", "4 hexadecimal digits"),
        ("root ::= other", "the rule root names the rule other, which is not there"),
        ('tree ::= "a"', "no rule named root"),
        ("root ::= [\\U00110000]", "no characters above"),
        ("root ::= <nothing>", "not one token of the vocabulary"),
        ("root ::= <[x]>", "a token is written as"),
        ("root ::= " + "[a-z]* " * 120_000, "more than 100,000 characters, sets and names"),
        (f'root ::= "{"x" * 120_000}"', "more than 100,000 characters, sets and names"),
        ("root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000, "groups are within each other"),
    ],
    ids=lambda each: each[:30],
)
def test_what_is_no_grammar_is_refused_with_its_line(grammar: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        takes(Constraint.gbnf(grammar), "")


@pytest.mark.parametrize(
    "grammar",
    [
        bomb(24),
        AMBIGUOUS,
        'root ::= "a" root root "b" | "a" root "b" | "a" root root "c" | "a"',
        'root ::= (("a"{500} "b"){500} "c"){500,1000000} | "(" root ")"',
        "\n".join(
            ["root ::= x0"] + [f"x{i} ::= x{i + 1}*" for i in range(2000)] + ['x2000 ::= "a"']
        ),
        "root ::= " + " | ".join(f'"w{i}"' for i in range(5_000)),
        "root ::= " + " | ".join(f'"w{i}" root' for i in range(3_000)),
        f"{'n' * 1_000_000} ::= " + "[a]* " * 5_000 + '\nroot ::= "a"',
        "\n".join(
            [f"x{i} ::= x{i + 1} x{i + 1}" for i in range(50)] + ['x50 ::= "a"', "root ::= x0"]
        ),
    ],
    ids=["before", "ambiguous", "nested", "count", "rules", "words", "many", "long", "doubling"],
)
def test_no_grammar_takes_long(grammar: str) -> None:
    start = time.thread_time()
    told = ""
    try:
        assert longest_step(Constraint.gbnf(grammar), b"a" * 300) < 0.5
    except SettingsError as error:
        told = str(error)
    assert len(told) < 400
    assert time.thread_time() - start < 10


def test_the_vocabulary_of_the_tests_is_one_of_bytes() -> None:
    assert byte_texts().tokenizer.tokenize_str("aé") == [*"aé".encode()]
