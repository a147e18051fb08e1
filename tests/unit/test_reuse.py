"""A prompt continues from the right part of a text that was read before."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from entropykv.session.reuse import Demand, HeldText, ReuseSource, common_prefix, reuse_of
from entropykv.session.sequence import TokenSequence

N_UBATCH = 8
TEXT = list(range(100, 130))


def held(
    n_prompt: int = 20,
    *,
    logits: bool = True,
    reusable_from: int = 0,
    returns_from: int = 0,
    n_sure: int = 64,
    is_whole: bool = True,
) -> HeldText:
    """Return a held text: a prompt read in micro-batches, and an answer after it."""
    row = np.zeros(4, np.float32)
    text = TokenSequence(N_UBATCH)
    for first in range(0, n_prompt, N_UBATCH):
        part = TEXT[first : min(first + N_UBATCH, n_prompt)]
        text.add(part, row, is_prompt=True)
    for token in TEXT[n_prompt:]:
        text.add([token], row, is_prompt=False)
    text.logits = row if logits else None
    text.reusable_from = reusable_from
    return HeldText(
        text, lambda position: position >= returns_from, is_whole=is_whole, n_sure=n_sure, n_ctx=64
    )


@pytest.mark.parametrize(
    ("change", "prompt", "demand", "position", "source"),
    [
        # The prompt begins with everything that was read.
        ({}, [*TEXT, 7], Demand(), 30, ReuseSource.WHOLE),
        ({}, TEXT, Demand(), 30, ReuseSource.WHOLE),
        ({"logits": False}, TEXT, Demand(), 29, ReuseSource.PART),
        ({"logits": False}, TEXT, Demand(needs_logits=False), 30, ReuseSource.WHOLE),
        ({"n_sure": 8}, [*TEXT, 7], Demand(end=40), 30, ReuseSource.WHOLE),
        # The prompt is the one that was read last.
        ({}, TEXT[:20], Demand(knows_prompt=True, end=40), 20, ReuseSource.PROMPT),
        ({}, TEXT[:20], Demand(end=40), 16, ReuseSource.PART),
        ({"n_sure": 8}, TEXT[:20], Demand(knows_prompt=True, end=40), 0, ReuseSource.NOTHING),
        ({}, TEXT[:19], Demand(knows_prompt=True, end=40), 16, ReuseSource.PART),
        # The question is read again, because attention to the document is measured meanwhile.
        (
            {},
            TEXT[:20],
            Demand(knows_prompt=True, end=40, reads_question=True),
            0,
            ReuseSource.NOTHING,
        ),
        ({}, TEXT[:25], Demand(is_cut=False, reads_question=True), 24, ReuseSource.PART),
        ({}, [*TEXT, 7], Demand(reads_question=True), 30, ReuseSource.WHOLE),
        # The texts differ from a token within the prompt on, or from one within the answer.
        ({}, [*TEXT[:13], 7, 8], Demand(), 8, ReuseSource.PART),
        ({}, [*TEXT[:13], 7, 8], Demand(is_cut=False), 13, ReuseSource.PART),
        ({}, [*TEXT[:16], 7, 8], Demand(), 16, ReuseSource.PART),
        ({}, [*TEXT[:20], 7, 8], Demand(), 16, ReuseSource.PART),
        ({}, [*TEXT[:25], 7, 8], Demand(), 25, ReuseSource.PART),
        ({}, TEXT[:25], Demand(is_cut=False), 24, ReuseSource.PART),
        ({"n_sure": 29}, [*TEXT[:25], 7], Demand(end=30), 0, ReuseSource.NOTHING),
        ({"n_sure": 30}, [*TEXT[:25], 7], Demand(end=30), 25, ReuseSource.PART),
        # Entries are missing: evicted, outside of a window, or lost in a failed decode.
        ({"reusable_from": 26}, [*TEXT[:25], 7], Demand(), 0, ReuseSource.NOTHING),
        ({"reusable_from": 25}, [*TEXT[:25], 7], Demand(), 25, ReuseSource.PART),
        ({"returns_from": 26}, [*TEXT[:25], 7], Demand(), 0, ReuseSource.NOTHING),
        ({"is_whole": False}, [*TEXT[:25], 7], Demand(), 0, ReuseSource.NOTHING),
        # The texts have no common beginning.
        ({}, [7, *TEXT], Demand(), 0, ReuseSource.NOTHING),
        ({}, TEXT[:1], Demand(), 0, ReuseSource.NOTHING),
    ],
)
def test_a_prompt_goes_on_from_what_is_sure_to_be_there(
    change: dict[str, int | bool],
    prompt: list[int],
    demand: Demand,
    position: int,
    source: ReuseSource,
) -> None:
    reuse = reuse_of(held(**change), prompt, demand)  # type: ignore[arg-type]
    assert (reuse.position, reuse.source) == (position, source), reuse.why
    if not demand.reads_question:
        assert reuse.shared == common_prefix(TEXT, prompt)


def test_tokens_in_common_are_found_in_lists_and_arrays() -> None:
    long = list(range(1000))
    for n in (0, 1, 255, 256, 257, 999, 1000):
        other = [*long[:n], -1]
        assert common_prefix(long, other) == n
        assert common_prefix(array("i", long), array("i", other)) == n


def test_a_later_prompt_is_read_again_from_its_own_beginning() -> None:
    text = TokenSequence(N_UBATCH)
    for part, is_prompt in ((TEXT[:8], True), (TEXT[8:12], True), (TEXT[12:13], False)):
        text.add(part, None, is_prompt=is_prompt)
    assert (text.parts.begin_of_prompt, text.parts.end_of_prompt) == (0, 12)
    for part in (TEXT[13:21], TEXT[21:22]):
        text.add(part, np.zeros(4, np.float32), is_prompt=True)
    assert (text.parts.begin_of_prompt, text.parts.end_of_prompt) == (13, 22)
    text.add(TEXT[22:23], None, is_prompt=False)
    known = HeldText(text, lambda _: True, n_sure=64, n_ctx=64)
    for prompt, position in ((TEXT[:22], 13), (TEXT[:18], 13), ([*TEXT[:10], 1], 10)):
        demand = Demand(is_cut=False, knows_prompt=True, reads_question=True)
        assert reuse_of(known, prompt, demand).position == position
    assert text.parts.begin_before(13) == 13


@pytest.mark.parametrize("position", [0, 1, 19, 20])
def test_a_text_rolls_back_to_every_position_including_its_own(position: int) -> None:
    row = np.zeros(4, np.float32)
    text = TokenSequence(N_UBATCH)
    text.add(TEXT[:20], row, is_prompt=True)
    text.truncate(position, 64)
    assert text.tokens.tolist() == TEXT[:position]
    assert text.position == position
    assert (text.logits is row) == (position == 20)
