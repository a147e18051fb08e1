"""A grammar determines the allowed tokens; none takes long, and every search can be stopped."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv._core import GrammarLimits, GrammarMatcher, TokenTrie
from tests.support.grammars import EMPTY, NONE, Walk, Words, bomb, either, repeat, takes, then

TRIE = TokenTrie([b"a"], [False])
WORDS = [b"ab", b"ba", b"aab", b"cab", b"bb", b"abcabc"]


def sets_of_words() -> st.SearchStrategy[Words]:
    letters = st.sampled_from(["a", "b", "ab", "bc"]).map(lambda each: Words("letters", (each,)))
    few = [(0, 1), (0, None), (1, None), (2, 3), (0, 2), (2, 2), (1, 4)]
    counts = st.sampled_from([*few, (0, 7), (5, 9), (6, None), (5, 5)])
    return st.recursive(
        letters | st.just(EMPTY),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: then(*pair)),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: either(*parts)),
            st.tuples(inner, counts).map(lambda pair: repeat(pair[0], *pair[1])),
        ),
        max_leaves=6,
    )


@settings(max_examples=300, deadline=None)
@given(words=sets_of_words(), data=st.data())
def test_the_tokens_that_may_follow_are_those_that_words_go_on_with(
    words: Words, data: st.DataObject
) -> None:
    """The expected tokens are computed by derivatives, which need no stacks."""
    walk = Walk(f"root ::= {words.gbnf()}", WORDS)
    for _ in range(6):
        expected = set()
        for token, text in enumerate(walk.texts[:-1]):
            rest = words
            for byte in text:
                rest = rest.after(chr(byte))
            if rest != NONE:
                expected.add(token)
        if words.has_empty:
            expected.add(walk.end)
        assert walk.allowed() == expected
        choices = sorted(expected - {walk.end})
        if not choices:
            break
        token = data.draw(st.sampled_from(choices))
        walk.matcher.accept(token)
        for byte in walk.texts[token]:
            words = words.after(chr(byte))


RECURSIVE = 'root ::= "(" root ")" root | "[" [a-c]+ "]" | # nothing\n'


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (RECURSIVE, ["", "()", "([a])[bc]", "(((())))"], ["(", "[]", "([a)]"]),
        ('root ::= "a"{2}', ["aa"], ["", "a", "aaa"]),
        ('root ::= "a"{5,7} "ab"{6,}', ["a" * 5 + "ab" * 6, "a" * 7 + "ab" * 99], ["a" * 8, "ab"]),
        ('root ::= ("a"? "b"?){0,9} "c"', ["c", "abc", "ab" * 9 + "c"], ["ab" * 10 + "c"]),
        ('root ::= "ab"{1,} "c"?', ["ab", "ababc"], ["", "aba"]),
        ('root ::= ("a" | "b"\n | "c")+?', ["", "a", "cab"], ["d"]),
        (r'root ::= [^\x00-\x60\[] "\u00e9\"\U0001F600"', ['aé"😀', 'éé"😀'], ['Aé"😀', 'a"']),
        ("root ::= other-1\nother-1 ::= .\r\n", ["é", "\n"], ["", "ab"]),
        ('root ::= [a-] "-"', ["a-", "--"], ["b-"]),
        ('root ::= ("a"? ("b"*)*)* "c"', ["c", "abbac"], ["ab"]),
        ('root ::= x "c"\nx ::= x | "a"', ["ac"], ["c", "aac"]),
    ],
)
def test_texts_in_a_grammar_and_others(grammar: str, inside: list[str], outside: list[str]) -> None:
    assert [takes(grammar, text) for text in inside] == [True] * len(inside)
    assert [takes(grammar, text) for text in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= (", "line 1: a group is not closed"),
        ('root ::= "a"\n\nother "b"', "line 3: ::= is expected"),
        ('root ::= "a" )', "the end of the line"),
        ('root ::= "a', "a quote or a bracket is not closed"),
        ("root ::= *", "nothing before a repetition"),
        ('root ::= "a"{3,2}', "below its first"),
        ('root ::= "\\q"', "a backslash stands before"),
        ("root ::= other", "the rule other is named, but not there"),
        ('tree ::= "a"', "no rule named root"),
        ('root ::= root "a" | "b"', "the rule root begins with itself"),
        ('root ::= x\nx ::= y "a" | "b"\ny ::= "c"? x', "begins with itself"),
        ('root ::= ("a"? root){0,9} "b"', "begins with itself"),
        ("root ::= x\nx ::= root", "no text fits it"),
        ("root ::= [\\U00110000]", "no characters above"),
        ('root ::= "\udcff"', "no UTF-8"),
        ("root ::= <nothing>", "not one token of the vocabulary"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(grammar: str, reason: str) -> None:
    text = grammar.encode("utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=reason):
        GrammarMatcher(text, "root", TRIE, GrammarLimits(), lambda _: None, lambda: None)


# --- too much -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [
        bomb(24),
        'root ::= "a"{20000000}',
        'root ::= "a"{0,99999999999999999999999}',
        'root ::= (("a"{500} "b"){500} "c"){500,1000001}',
        "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000,
        "\n".join(["root ::= x0"] + [f"x{i} ::= x{i + 1}*" for i in range(100_000)]),
        "root ::= " + " | ".join(f'"w{i}"' for i in range(40_000)),
        f"{'n' * 1_000_000} ::= " + "[a]* " * 50_000,
    ],
    ids=["ambiguous", "count", "most", "nested", "groups", "rules", "alternatives", "long name"],
)
def test_too_large_a_grammar_is_refused_at_once(grammar: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"too large|too ambiguous|repeats|no rule") as caught:
        Walk(grammar)
    assert time.monotonic() - start < 5
    assert len(str(caught.value)) < 300


def test_a_grammar_that_grows_ambiguous_is_refused_while_text_is_written() -> None:
    """The number of possible middles of a palindrome doubles with every letter."""
    walk = Walk('root ::= [a] root root "b" | [a] root "b" | [a] root root "c" | [a]')
    with pytest.raises(ValueError, match="too ambiguous"):  # noqa: PT012
        for _ in range(40):
            assert ord("a") in walk.allowed()
            walk.take("a")


class _StopError(Exception):
    pass


def test_a_search_is_stopped_by_what_the_poll_raises() -> None:
    """Without any limit, the search would take hours."""
    stopped_at = time.monotonic() + 0.3

    def poll() -> None:
        if time.monotonic() > stopped_at:
            raise _StopError

    endless = dict.fromkeys(("most_work", "most_stacks"), 2**62)
    with pytest.raises(_StopError):
        Walk(bomb(40), poll=poll, most_kept=30_000_000, **endless)
    assert time.monotonic() < stopped_at + 1
    stopped_at = time.monotonic() + 0.3
    grammar = bomb(22).replace("root ::= x0", 'root ::= "y" x0')
    walk = Walk(grammar, poll=poll, most_kept=30_000_000, **endless)
    with pytest.raises(_StopError):
        walk.take("y")
    assert time.monotonic() < stopped_at + 1


def test_repetitions_cost_no_more_the_more_there_are() -> None:
    start = time.monotonic()
    walk = Walk('root ::= [a-z]{999999,1000000} ("b"{7,900000} "c"){5,800000}')
    for _ in range(100):
        assert ord("a") in walk.allowed()
        walk.take("a" * 9999)
    walk.take("a" * 100)
    assert walk.allowed() == {ord("b")}
    walk.take("b" * 100)
    assert not walk.matcher.may_end
    walk.take("cbbbbbbbc" + "bbbbbbbc" * 4)
    assert walk.matcher.may_end
    assert time.monotonic() - start < 30


def test_a_long_text_needs_no_more_than_is_kept_at_a_time() -> None:
    walk = Walk('root ::= "(" root ")" | [a-z]', most_kept=2_000)
    for _ in range(30):
        assert ord("(") in walk.allowed()
        walk.take(b"(" * 10)
    walk.take(b"x" + b")" * 300)
    assert walk.matcher.may_end


# --- characters of several bytes, and tokens by their numbers -------------------------------------


def test_a_character_may_be_split_between_tokens() -> None:
    walk = Walk("root ::= [é€] .", ["€".encode()[:2], "é".encode()])
    assert walk.allowed() == {0xC3, 0xE2, 256, 257}
    walk.matcher.accept(256)
    assert walk.allowed() == {0xAC}
    assert not walk.matcher.may_end
    walk.take(b"\xac")
    assert not {0xC0, 0xC1, 0xF5, 0x80, walk.end} & walk.allowed()
    assert {0x41, 0xC2, 0xF4} <= walk.allowed()


def test_bytes_that_no_character_has_are_not_allowed() -> None:
    for first, seconds in ((0xE0, (0xA0, 0xBF)), (0xED, (0x80, 0x9F)), (0xF4, (0x80, 0x8F))):
        walk = Walk("root ::= .*").take(bytes([first]))
        allowed = sorted(walk.allowed())
        assert (allowed[0], allowed[-1]) == seconds


def test_tokens_by_their_numbers() -> None:
    walk = Walk("root ::= <[256]> !<[97]> !<[98]>", [b"<think>"])
    assert walk.allowed() == {256}
    with pytest.raises(ValueError, match="does not allow"):
        walk.take("<")
    walk.matcher.accept(256)
    assert ord("a") not in walk.allowed()
    assert {ord("b"), 256} < walk.allowed()
    assert walk.end not in walk.allowed()
