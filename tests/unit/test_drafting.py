"""Drafts come from n-grams of the text or a function, and are only as long as they save time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.session.drafter import Evidence, FunctionDrafter, NgramDrafter, Tokens
from entropykv.session.drafting import Drafting, DraftLengths, StepCosts

SMALL = st.lists(st.integers(0, 3), max_size=60)


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def longest_earlier(text: list[int]) -> int:
    """Return how many tokens, at most 32, before some earlier place equal the end of a text."""
    agreed = (
        next(
            (n for n in range(min(end, 32) + 1) if n == end or text[end - n - 1] != text[-n - 1]), 0
        )
        for end in range(1, len(text))
    )
    return max(agreed, default=0)


def test_what_followed_the_longest_match_is_drafted() -> None:
    drafter = NgramDrafter()
    assert drafter.draft(tokens(9, 1, 2, 3, 7, 8, 1, 2, 3, 4, 5, 9, 1, 2, 3), 2) == (
        [7, 8],
        Evidence(4, source=4),
    )
    assert drafter.draft(tokens(1, 2), 4) == ([], Evidence(0))


@given(SMALL)
def test_a_draft_is_an_earlier_continuation(text: list[int]) -> None:
    drafts, evidence = NgramDrafter().draft(np.array(text, np.int32), 5)
    agreed = evidence.agreed
    assert not evidence.is_resumed
    assert agreed <= longest_earlier(text)
    if drafts:
        assert text[evidence.source :][:5] == drafts
        assert agreed >= 3
        wanted = [*text[-agreed:], *drafts]
        places = (text[i : i + len(wanted)] for i in range(len(text) - agreed))
        assert any(place == wanted for place in places)


@given(SMALL, SMALL, st.integers(0, 60))
def test_a_rollback_leaves_no_place_of_what_was_there(
    first: list[int], second: list[int], kept: int
) -> None:
    drafter = NgramDrafter()
    drafter.draft(np.array(first, np.int32), 5)
    text = [*first[:kept], *second]
    drafter.draft(np.array(first[:kept], np.int32), 5)
    drafts, evidence = drafter.draft(np.array(text, np.int32), 5)
    if drafts:
        wanted = drafts if evidence.is_resumed else [*text[-evidence.agreed :], *drafts]
        assert any(text[i : i + len(wanted)] == wanted for i in range(len(text)))


def test_the_tables_grow_with_the_text() -> None:
    drafter = NgramDrafter()
    assert drafter.n_bytes == 0
    for n in (10, 1000, 300_000):
        drafter.draft(np.arange(n, dtype=np.int32), 5)
        assert 4 * n <= drafter.n_bytes <= max(1024, 12 * n)


@given(st.lists(SMALL, max_size=6))
def test_a_text_that_grows_is_indexed_as_if_it_came_at_once(pieces: list[list[int]]) -> None:
    drafter, text = NgramDrafter(), tokens()
    for piece in pieces:
        text = np.append(text, np.array(piece, np.int32)).astype(np.int32)
        drafter.draft(text, 5)
        fresh = NgramDrafter()
        expected = fresh.draft(text, 5)
        # A larger table gives other n-grams the same hash.
        if len(fresh._latest) != len(drafter._latest):
            continue
        if len(text) > 3:
            assert drafter._longest_match(text) == fresh._longest_match(text)
        drafter._source = -1
        assert drafter.draft(text, 5) == expected


def row_of_a_table(number: int) -> list[int]:
    """Return twelve tokens, of which four depend on the number of the row."""
    return [*range(100, 104), number, *range(104, 107), number + 1, number + 2, 107, number + 3]


def test_a_pattern_is_followed_on_behind_what_differs() -> None:
    drafter, text = NgramDrafter(), row_of_a_table(1000) + row_of_a_table(2000)
    following = row_of_a_table(3000)
    text += following[:4]
    assert drafter.draft(tokens(*text), 9)[0][:4] == [2000, 104, 105, 106]
    text.append(following[4])
    drafts, evidence = drafter.draft(tokens(*text), 9)
    assert evidence.is_resumed
    assert drafts[:3] == following[5:8]


def test_a_place_is_not_followed_on_behind_a_rollback() -> None:
    drafter, text = NgramDrafter(), row_of_a_table(1000) + row_of_a_table(2000)[:4]
    assert drafter.draft(tokens(*text), 9)[0]
    assert drafter.draft(tokens(*text[:-6]), 9) == ([], Evidence(0))


def costs(of_token: float) -> StepCosts:
    found = StepCosts()
    for n in (1, 2, 4, 8, 1, 3, 6, 2, 8, 1) * 5:
        found.note(n, 0.01 * (1.0 + of_token * (n - 1)))
    return found


def test_costs_of_steps_become_those_that_are_measured() -> None:
    assert abs(costs(0.3).relative(5) - 2.2) < 0.1
    assert abs(costs(0.0).relative(9) - 1.0) < 0.1
    assert StepCosts().relative(1) == 1.0


def test_the_first_of_several_tokens_may_cost_more_than_the_others() -> None:
    found = StepCosts()
    for n in (1, 2, 4, 8, 1, 3, 6, 2, 8, 1) * 5:
        found.note(n, 0.01 if n == 1 else 0.02 + 0.001 * n)
    assert found.relative(1) == 1.0
    assert abs(found.relative(2) - 2.2) < 0.1
    assert abs(found.relative(10) - 3.0) < 0.15
    assert abs(found.single_seconds - 0.01) < 1e-4


def test_costs_are_known_where_no_step_read_a_single_token() -> None:
    found = StepCosts()
    for n in (8, 9, 10, 12, 16) * 10:
        found.note(n, 0.02 + 0.001 * n)
    assert found.relative(16) / found.relative(8) == pytest.approx(36 / 28, rel=0.05)


def test_a_step_that_was_interrupted_does_not_end_drafting() -> None:
    found = costs(0.1)
    before = found.relative(4)
    found.note(4, 1.0)
    assert found.relative(4) < 1.3 * before


def test_a_first_step_that_was_interrupted_does_not_end_drafting() -> None:
    found = StepCosts()
    found.note(13, 1.0)
    for n in (1, 1, 2, 1):
        found.note(n, 0.01 * (1.0 + 0.1 * (n - 1)))
    assert found.single_seconds == pytest.approx(0.01, rel=0.01)
    assert found.relative(4) < 1.7


SURE = Evidence(32)


def lengths(of_token: float) -> DraftLengths:
    return DraftLengths(costs(of_token), 15)


def test_cheap_tokens_are_drafted_and_dear_ones_are_not() -> None:
    assert lengths(0.05).choose(15, SURE) >= 12
    assert 0 < lengths(0.3).choose(15, SURE) < 15
    assert lengths(1.0).choose(15, SURE) == 0


def written(found: DraftLengths, drafts: list[int], text: list[int], times: int) -> None:
    """Let the same drafts be made `times` times, each followed by the same text."""
    so_far = tokens()
    for _ in range(times):
        found.expect(so_far, drafts, SURE)
        so_far = np.append(so_far, tokens(*text)).astype(np.int32)
        found.compare(so_far)


def test_drafts_that_are_wrong_are_read_less_and_tried_again_later() -> None:
    found = lengths(0.3)
    assert found.choose(15, SURE) > 0
    written(found, [1, 2, 3, 4], [5, 6, 7, 8], 50)
    assert found.choose(15, SURE) == 0
    for _ in range(2000):
        found.compare(tokens())
    assert found.choose(15, SURE) > 0


def test_a_run_ends_where_drafts_are_usually_wrong() -> None:
    found = lengths(0.2)
    written(found, [1] * 15, [1] * 6 + [2] * 9, 50)
    assert found.choose(15, SURE) == 6
    assert found.choose(4, SURE) == 4


def test_a_longer_run_is_read_because_it_would_have_been_right() -> None:
    found = lengths(0.1)
    written(found, [1] * 15, [2] * 15, 30)
    assert found.choose(15, SURE) == 0
    written(found, [1] * 15, [1] * 15, 30)
    assert found.choose(15, SURE) == 15


def test_drafts_before_a_rollback_are_not_compared_with_what_is_written_then() -> None:
    found, fresh = lengths(0.1), lengths(0.1)
    found.expect(tokens(1, 2, 3), [4, 5], SURE)
    found.compare(tokens(1, 2, 3))
    found.compare(tokens(1, 2))
    found.compare(tokens(1, 2, 3, 9, 9))
    assert found.chances(SURE) == fresh.chances(SURE)


def follow_rows(found: DraftLengths, n: int) -> Tokens:
    """Write n rows of ten tokens that differ in one; each row is drafted as the row before it."""
    text = tokens(*range(10))
    for number in range(100, 100 + n):
        evidence = SURE._replace(source=len(text) - 10)
        found.expect(text, text[-10:].tolist(), evidence)
        row = [*range(5), number, *range(6, 10)]
        text = np.append(text, tokens(*row)).astype(np.int32)
        found.compare(text)
    return text


def test_a_run_ends_where_its_source_differed_from_its_own() -> None:
    drafting = Drafting(NgramDrafter(), costs(0.2), 15)
    rng, steps = np.random.default_rng(0), []
    # Rows have their numbers at different places, so that the place in a run says nothing.
    widths = rng.integers(4, 14, 8).tolist()
    text: list[int] = []
    for _ in range(20):
        for row, width in enumerate(widths):
            text += [*range(100 * row, 100 * row + width), 10_000 + len(text)]
    position = 4 * (sum(widths) + 8)
    while position < len(text) - 20:
        drafts = drafting.propose(tokens(*text[:position]), 15)
        followed = text[position : position + len(drafts)]
        right = next((i for i, d in enumerate(drafts) if d != followed[i]), len(drafts))
        steps.append((len(drafts), right))
        position += right + 1
    drafted, accepted = np.sum(steps[len(steps) // 2 :], axis=0)
    assert accepted > 0.9 * drafted
    assert accepted > 4 * len(steps) / 2


def test_what_differed_is_forgotten_at_a_rollback() -> None:
    found = lengths(0.2)
    text = follow_rows(found, 30)
    source = len(text) - 10
    found.compare(text[:source])
    evidence = SURE._replace(source=source)
    assert found.chances(evidence) == pytest.approx(found.chances(SURE))
    assert found.chances(evidence._replace(source=source - 10)) != pytest.approx(
        found.chances(SURE), abs=0.01
    )


def test_the_table_of_outcomes_is_counted() -> None:
    found = lengths(0.2)
    assert found.n_bytes == 0
    text = follow_rows(found, 300)
    assert len(text) <= found.n_bytes <= 2 * len(text)


def test_drafts_that_cost_time_are_made_only_where_they_pay() -> None:
    found = lengths(0.1)
    assert found.choose(15, SURE, cost_each=0.1) > found.choose(15, SURE, cost_each=0.5) > 0
    assert found.choose(15, SURE, cost_each=1.0) == 0


class Dear:
    """Make wrong drafts that take as long as a step."""

    n_bytes = 0
    seconds_each = 0.002

    def __init__(self) -> None:
        self.asked = 0

    def draft(self, text: Tokens, most: int) -> tuple[list[int], Evidence]:  # noqa: ARG002
        self.asked += 1
        return [1] * most, Evidence(2)

    def close(self) -> None:
        return


def test_a_dear_drafter_that_is_wrong_is_asked_seldom() -> None:
    drafter = Dear()
    drafting = Drafting(drafter, costs(0.1), 15)
    for n in range(400):
        drafts = drafting.propose(np.arange(2, 2 + n, dtype=np.int32), 15)
        drafting.note(len(drafts), 0)
    assert 2 <= drafter.asked < 20


def test_a_function_drafts_and_is_cut() -> None:
    drafter = FunctionDrafter(lambda text: np.append(text, 7))
    assert drafter.draft(tokens(4, 5), 9)[0] == [4, 5, 7]
    assert drafter.draft(tokens(4, 5), 2)[0] == [4, 5]
    assert drafter.draft(tokens(4, 5), 0) == ([], Evidence(8))
