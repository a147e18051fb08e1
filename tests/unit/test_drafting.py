"""What is drafted, and how much of it: n-grams of the text, and lengths that pay."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropykv.session.drafting import DraftLengths, NgramDrafter, StepCosts, Tokens

SMALL = st.lists(st.integers(0, 3), max_size=60)


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def longest_earlier(text: list[int]) -> int:
    """How many tokens before an earlier place agree with the end of a text, at most 32."""
    agreed = (
        next(
            (n for n in range(min(end, 32) + 1) if n == end or text[end - n - 1] != text[-n - 1]), 0
        )
        for end in range(1, len(text))
    )
    return max(agreed, default=0)


def test_what_followed_the_longest_match_is_drafted() -> None:
    drafter = NgramDrafter(64)
    assert drafter.draft(tokens(9, 1, 2, 3, 7, 8, 1, 2, 3, 4, 5, 9, 1, 2, 3), 2) == ([7, 8], 4)
    assert drafter.draft(tokens(1, 2), 4) == ([], 0)


@given(SMALL)
def test_a_draft_is_an_earlier_continuation(text: list[int]) -> None:
    drafts, sureness = NgramDrafter(64).draft(np.array(text, np.int32), 5)
    assert sureness <= longest_earlier(text)
    if drafts:
        assert sureness >= 3
        wanted = [*text[-sureness:], *drafts]
        places = (text[i : i + len(wanted)] for i in range(len(text) - sureness))
        assert any(place == wanted for place in places)


@given(SMALL, SMALL, st.integers(0, 60))
def test_a_rollback_leaves_no_place_of_what_was_there(
    first: list[int], second: list[int], kept: int
) -> None:
    drafter = NgramDrafter(130)
    drafter.draft(np.array(first, np.int32), 5)
    text = [*first[:kept], *second]
    drafter.draft(np.array(first[:kept], np.int32), 5)
    drafts, sureness = drafter.draft(np.array(text, np.int32), 5)
    if drafts:
        wanted = [*text[-sureness:], *drafts]
        assert any(text[i : i + len(wanted)] == wanted for i in range(len(text)))


def test_the_tables_are_counted_and_bounded() -> None:
    assert 4 * 1000 <= NgramDrafter(1000).n_bytes <= 20_000
    assert NgramDrafter(10**6).n_bytes <= 4 * (10**6 + 1) + 4 * 2**16


def costs(of_token: float) -> StepCosts:
    found = StepCosts()
    for n in (1, 2, 4, 8, 1, 3, 6, 2, 8, 1) * 5:
        found.note(n, 0.01 * (1.0 + of_token * (n - 1)))
    return found


def test_costs_of_steps_become_those_that_are_measured() -> None:
    assert abs(costs(0.3).relative(5) - 2.2) < 0.1
    assert abs(costs(0.0).relative(9) - 1.0) < 0.1
    assert StepCosts().relative(1) == 1.0


def test_cheap_tokens_are_drafted_and_dear_ones_are_not() -> None:
    assert DraftLengths(costs(0.05)).choose(15, 32) == 15
    assert 0 < DraftLengths(costs(0.3)).choose(15, 32) < 15
    assert DraftLengths(costs(1.0)).choose(15, 32) == 0


def test_drafts_that_are_wrong_are_read_less_and_tried_again_later() -> None:
    lengths = DraftLengths(costs(0.3))
    assert lengths.choose(15, 32) > 0
    for _ in range(50):
        lengths.note(32, 4, 0)
    assert lengths.choose(15, 32) == 0
    assert any(lengths.choose(15, 32) > 0 for _ in range(2000))
