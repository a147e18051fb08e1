"""A prefix says which tokens of a prompt a cache holds, and the index of texts finds what a linear
scan over them finds (no model needed).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.generation.resuming import continuing, control_symbol, spelling
from entropykv.session.reuse import PrefixIndex, common_prefix

TEXTS = st.lists(st.integers(0, 1), max_size=7)
OWNERS = st.sampled_from(["anna", "ben"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), OWNERS, TEXTS),
        st.tuples(st.just("remove"), st.integers(0, 40)),
        st.tuples(st.just("touch"), st.integers(0, 40)),
    ),
    max_size=40,
)


@dataclass(eq=False)
class Text:
    """Hold a text, of which the first `worth` tokens save reading."""

    owner: str
    tokens: array[int]
    worth: int

    def saves(self, shared: int) -> int:
        return min(shared, self.worth)


class Scan:
    """Do what the index does by a scan over all texts."""

    def __init__(self) -> None:
        self.texts: list[Text] = []

    def longest_first(self, tokens: array[int], owner: str) -> list[tuple[Text, int]]:
        found = [
            (each, common_prefix(each.tokens, tokens))
            for each in reversed(self.texts)
            if each.owner == owner
        ]
        found.sort(key=lambda each: (-each[1], len(each[0].tokens) > each[1]))
        return [each for each in found if each[1] > 0]

    def nearest(self, tokens: array[int], owner: str) -> tuple[Text | None, int]:
        def rank(found: tuple[Text, int]) -> tuple[int, bool]:
            text, shared = found
            saved = text.saves(shared)
            return saved, len(text.tokens) == saved

        best = max(self.longest_first(tokens, owner), key=rank, default=None)
        if best is None or best[0].saves(best[1]) == 0:
            return None, 0
        return best[0], best[0].saves(best[1])

    def same(self, tokens: array[int], owner: str) -> list[Text]:
        return [each for each in self.texts if (each.owner, each.tokens) == (owner, tokens)]


def edges(index: PrefixIndex) -> Iterator[Any]:
    nodes = [child for root in index._roots.values() for child in root.children.values()]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children.values()


@given(STEPS, TEXTS, OWNERS, st.data())
@settings(max_examples=200)
def test_the_index_finds_what_a_scan_finds(
    steps: list[tuple[Any, ...]], prompt: list[int], owner: str, data: st.DataObject
) -> None:
    index = PrefixIndex()
    scan = Scan()
    for what, *arguments in steps:
        if what == "add":
            text = Text(arguments[0], array("i", arguments[1]), data.draw(st.integers(0, 7)))
            index.add(text, text.tokens, text.owner)
            scan.texts.append(text)
        elif scan.texts:
            text = scan.texts.pop(arguments[0] % len(scan.texts))
            if what == "remove":
                index.remove(text)
            else:
                index.touch(text)
                scan.texts.append(text)
    beginning = data.draw(st.sampled_from(scan.texts)).tokens if scan.texts else array("i")
    asked = beginning[: data.draw(st.integers(0, 7))] + array("i", prompt)
    assert index.of(Text) == scan.texts
    assert index.longest_first(Text, asked, owner) == scan.longest_first(asked, owner)
    assert index.nearest(Text, asked, owner, Text.saves) == scan.nearest(asked, owner)
    assert set(index.same(Text, asked, owner)) == set(scan.same(asked, owner))
    held = [each.tokens for each in scan.texts]
    for node in edges(index):
        assert any(node.witness is tokens for tokens in held), "the tokens of a removed text"
        assert node.items or len(node.children) > 1


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        # Both save one token, but the second one need not be cut for that.
        ([([0, 1, 1], 1), ([0], 1)], 1),
        ([([0], 1), ([0, 1, 1], 1)], 0),
        # Both must be cut; the first one shares more.
        ([([0, 1, 1], 1), ([0, 1, 0], 1)], 0),
        # Both share and save equally much; the second one was used last.
        ([([0, 1, 0], 2), ([0, 1, 0, 0], 2)], 1),
        # The one that shares most saves nothing, so another one is found.
        ([([0, 1, 1, 0], 0), ([0, 1], 2), ([0], 1)], 1),
        ([([0, 1, 1, 0], 0)], None),
    ],
)
def test_which_of_several_texts_is_taken(
    texts: list[tuple[list[int], int]], found: int | None
) -> None:
    index = PrefixIndex()
    made = [Text("anna", array("i", tokens), worth) for tokens, worth in texts]
    for text in made:
        index.add(text, text.tokens, text.owner)
    best, saved = index.nearest(Text, array("i", [0, 1, 1, 0]), "anna", Text.saves)
    assert best is (None if found is None else made[found])
    assert saved == (0 if found is None else texts[found][1])


def test_long_texts_part_within_and_between_blocks() -> None:
    long = array("i", range(1000))
    index = PrefixIndex()
    for n in (1, 255, 256, 257, 999):
        index.add(n, array("i", [*long[:n], -1]))
    found = index.longest_first(int, long)
    assert found == [(n, n) for n in (999, 257, 256, 255, 1)]
    index.add(1000, long)
    assert index.nearest(int, long, None, lambda _, shared: shared) == (1000, 1000)


def test_a_lookup_does_not_touch_the_texts_of_others() -> None:
    index = PrefixIndex()
    index.add("hers", array("i", [1, 2, 3]), "anna")
    assert index.longest_first(str, array("i", [1, 2, 3]), "ben") == []
    assert index.same(str, array("i", [1, 2, 3]), "ben") == []
    index.remove("hers")
    assert not index._roots


def test_nobody_changes_the_texts_during_a_lookup() -> None:
    """No text is removed while another thread looks for one, as workers of a server do."""
    index = PrefixIndex()
    tokens = array("i", [1, 2, 3])
    index.add("first", tokens)
    others: list[threading.Thread] = []

    def saved(_: str, shared: int) -> int:
        others.append(threading.Thread(target=index.remove, args=("first",)))
        others[0].start()
        others[0].join(0.1)
        assert others[0].is_alive()
        assert index.of(str) == ["first"]
        return shared

    assert index.nearest(str, tokens, None, saved) == ("first", 3)
    others[0].join(10)
    assert index.of(str) == []


PIECES = [b"a", b"b", b" ", b"\n", b"ab", b"aba", b"ba", b" a", b"b ", b"\xc3", b"\xa9", b"<end>"]
END, BEGIN = 100, 101  # The two control tokens; the last piece is the name of END.
TEXT = [b"a", b"b", b" ", b"\n", "é".encode()]


def spell(token: int) -> str:
    return control_symbol(token) if token >= END else spelling(PIECES[token])


def spelled(tokens: list[int]) -> str:
    return "".join(map(spell, tokens))


def tokenize(text: bytes) -> list[int]:
    """Return tokens greedily, the longest piece first; bytes without a piece are left out."""
    tokens: list[int] = []
    while text:
        fits = [i for i, piece in enumerate(PIECES) if text.startswith(piece)]
        if fits:
            tokens.append(max(fits, key=lambda i: len(PIECES[i])))
        text = text[len(PIECES[tokens[-1]]) if fits else 1 :]
    return tokens


def tokenize_after_a_space(text: bytes) -> list[int]:
    """Return tokens as sentencepiece does, which begins every text with a space."""
    return tokenize(b" " + text)


tokens_of_text = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
sequences = st.lists(st.integers(0, len(PIECES) - 1) | st.sampled_from([END, BEGIN]), max_size=15)


@given(sequences, sequences, st.sampled_from([tokenize, tokenize_after_a_space]))
def test_a_continuation_spells_the_prompt_and_begins_with_the_cache(
    cached: list[int], rest: list[int], cut: object
) -> None:
    """The tokens found spell the prompt and begin with those of the cache.

    The prompt is the cached text, tokenised greedily between control tokens, followed by `rest`.
    """
    prompt: list[int] = []
    plain = b""
    for token in cached:
        if token < END:
            plain += PIECES[token]
            continue
        prompt += [*tokenize(plain), token]
        plain = b""
    prompt += tokenize(plain) + rest
    found = continuing(cached, prompt, spell, cut)  # type: ignore[arg-type]
    assert found is not None
    assert found[: len(cached)] == cached
    assert spelled(found) == spelled(prompt)


@given(sequences, sequences)
def test_there_is_a_continuation_only_of_the_same_text(
    cached: list[int], prompt: list[int]
) -> None:
    found = continuing(cached, prompt, spell, tokenize)
    assert (found is not None) == spelled(prompt).startswith(spelled(cached))


@given(tokens_of_text, tokens_of_text, tokens_of_text)
def test_what_follows_the_next_control_token_stays_as_it_is(
    cached: list[int], middle: list[int], rest: list[int]
) -> None:
    prompt = [*tokenize(b"".join(PIECES[t] for t in cached + middle)), END, *rest]
    found = continuing(cached, prompt, spell, tokenize)
    assert found is not None
    assert found[len(found) - len(rest) - 1 :] == [END, *rest]


def test_a_token_that_reaches_beyond_the_cache_is_cut_again() -> None:
    a, b, ab, aba = (PIECES.index(piece) for piece in (b"a", b"b", b"ab", b"aba"))
    assert continuing([a], [ab, END, aba], spell, tokenize) == [a, b, END, aba]
    assert continuing([a, b], [ab, END], spell, tokenize) == [a, b, END]


def test_a_control_token_is_not_its_name() -> None:
    name = PIECES.index(b"<end>")
    assert continuing([name], [END, 0], spell, tokenize) is None
    assert continuing([END], [name, 0], spell, tokenize) is None


def test_no_continuation_where_the_tokenizer_cannot_spell_the_rest() -> None:
    first = PIECES.index(b"a")
    whole = PIECES.index(b"aba")
    assert continuing([first], [whole], spell, lambda _: []) is None
    assert continuing([first], [whole], spell, lambda _: [first]) is None


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    count = common_prefix(first, second)
    assert first[:count] == second[:count]
    assert first[count : count + 1] != second[count : count + 1] or count == len(first) == len(
        second
    )
