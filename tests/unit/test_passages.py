"""A document's text is cut into passages of whole sentences, which together are the text."""

from __future__ import annotations

import itertools

import pytest

from entropykv.session.passages import _LONGEST, _places_in, cut_into_passages


def words(text: str) -> list[bytes]:
    """Return a token for every word, with the space before it."""
    return [f" {word}".encode() for word in text.split(" ")]


def test_passages_end_with_sentences_and_have_every_token_once() -> None:
    tokens = words(" ".join(["one two three four five six seven eight nine ten."] * 12))
    cuts = cut_into_passages(tokens)
    assert cuts == [0, 30, 60, 90, 120]


def test_a_text_without_sentences_is_cut_at_the_longest_passage() -> None:
    cuts = cut_into_passages(words("word " * 150))
    assert {end - begin for begin, end in itertools.pairwise(cuts[:-1])} == {_LONGEST}
    assert cuts[-1] == 151


@pytest.mark.parametrize("tokens", [[], [b"one"]])
def test_a_short_text_is_one_passage(tokens: list[bytes]) -> None:
    assert cut_into_passages(tokens) == [0, 1][: len(tokens) + 1]


def test_places_count_characters_of_the_text_and_not_bytes_of_the_template() -> None:
    text = "Ä und €."
    tokens = [b"<user>", "Ä".encode()[:1], "Ä".encode()[1:], b" und", " €.".encode(), b"\n"]
    first, ends = _places_in(text, tokens)
    assert first == 1
    assert [text[a:b] for a, b in itertools.pairwise(ends)] == ["", "Ä", "", " und", " €.", ""]
