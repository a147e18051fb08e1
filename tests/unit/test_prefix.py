"""A prefix says which tokens of a prompt a cache holds; the vocabulary of the tests is made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from entropykv.generation.resuming import continuing, control_symbol, spelling
from entropykv.session.reuse import common_prefix

PIECES = [b"a", b"b", b" ", b"\n", b"ab", b"aba", b"ba", b" a", b"b ", b"\xc3", b"\xa9", b"<end>"]
END, BEGIN = 100, 101  # The two control tokens; END is spelled <end>.
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
