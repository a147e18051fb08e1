"""Sequences of a pool get pages by need, by weight, and by the loss that a page prevents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.policy.division import Claim, LossCurve, divide, parts_by_weight


def curve(begin: float, *pieces: tuple[float, float]) -> LossCurve:
    """Return a loss curve from `begin` pages on; each piece is (pages, loss that one page of it
    prevents).
    """
    return LossCurve(begin, *(np.array(values, float) for values in zip(*pieces, strict=True)))


CASES = [
    ("all fit", 100, [Claim(10, 10), Claim(20, 20)], [50, 50]),
    ("one is long", 100, [Claim(10, 10), Claim(200, 200)], [10, 90]),
    ("the rest is for all", 100, [Claim(10, 10), Claim(60, 60)], [40, 60]),
    ("two are long", 90, [Claim(10, 10), Claim(99, 99), Claim(99, 99)], [10, 40, 40]),
    ("weights", 90, [Claim(15, 15), Claim(99, 99), Claim(99, 99, 2.0)], [15, 25, 50]),
    ("nobody fits", 90, [Claim(99, 99)] * 3, [30, 30, 30]),
    (
        "steep beside flat",
        100,
        [
            Claim(80, 20, 1.0, curve(10, (30, 5.0), (40, 2.0))),
            Claim(80, 20, 1.0, curve(10, (70, 1))),
        ],
        [80, 20],
    ),
    (
        "steep until it is flat",
        100,
        [
            Claim(80, 20, 1.0, curve(10, (30, 5.0), (40, 0.5))),
            Claim(80, 20, 1.0, curve(10, (70, 1))),
        ],
        [40, 60],
    ),
    (
        "a weight makes steeper",
        100,
        [Claim(80, 20, 1.0, curve(10, (70, 1.5))), Claim(80, 30, 2.0, curve(10, (70, 1)))],
        [20, 80],
    ),
    (
        "what is not known keeps its part",
        90,
        [
            Claim(80, 30),
            Claim(80, 10, 1.0, curve(5, (75, 9))),
            Claim(80, 10, 1.0, curve(5, (75, 1))),
        ],
        [30, 50, 10],
    ),
    (
        "nothing is lost by anybody",
        100,
        [Claim(80, 20, 1.0, curve(10, (70, 0.0))), Claim(80, 20, 1.0, curve(10, (70, 0.0)))],
        [50, 50],
    ),
]


@pytest.mark.parametrize(
    ("pages", "claims", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_division(pages: int, claims: list[Claim], expected: list[int]) -> None:
    found = divide(pages, claims)
    assert found == expected


CURVES = st.none() | st.builds(
    lambda begin, pieces: curve(begin, *((n, loss) for n, loss in zip(*pieces, strict=True))),
    st.floats(0.0, 50.0),
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(0.1, 40.0), min_size=n, max_size=n),
            st.lists(st.floats(0.0, 9.0), min_size=n, max_size=n).map(
                lambda values: sorted(values, reverse=True)
            ),
        )
    ),
)
CLAIMS = st.builds(Claim, st.integers(1, 500), st.integers(1, 40), st.floats(0.1, 10.0), CURVES)


@given(st.integers(0, 900), st.lists(CLAIMS, min_size=1, max_size=9))
def test_no_page_is_given_twice_and_nobody_gets_less_than_is_sure(
    pages: int, claims: list[Claim]
) -> None:
    found = divide(pages, claims)
    assert sum(found) <= pages
    parts = parts_by_weight(pages, [claim.weight for claim in claims])
    for claim, part, share in zip(claims, parts, found, strict=True):
        sure = part if claim.curve is None else min(part, claim.floor)
        assert share >= min(claim.needed, sure)
    wanted = sum(claim.needed for claim in claims)
    # No page is left that a sequence needs.
    assert sum(found) >= min(pages, wanted) - len(claims)
    if wanted <= pages:
        assert all(s >= c.needed for s, c in zip(found, claims, strict=True))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 8), st.floats(0.0, 1.0))
def test_pages_go_where_they_prevent_most(
    seed: int, n_heads: int, n_knots: int, part: float
) -> None:
    """Pages prevent as much loss as the best single entries would, taken one by one."""
    random = np.random.default_rng(seed)
    scores = -np.sort(-random.random((n_heads, 40)), axis=1)
    knots = np.concatenate(
        [[0], np.sort(random.choice(np.arange(1, 40), n_knots - 1, False)), [40]]
    )
    losses = np.array([[row[k:].sum() for k in knots] for row in scores])
    floors = random.integers(0, 9, n_heads)
    one = LossCurve.of_heads(floors, np.full(n_heads, 1), knots.astype(float), losses)
    pages = part * one.pages.sum()
    lengths, prevented = one.between(one.begin, one.begin + pages)
    assert lengths.sum() == pytest.approx(pages)
    assert np.all(np.diff(prevented) <= 1e-9)
    pieces = np.diff(knots)
    each = np.repeat(-np.diff(losses, axis=1) / pieces, pieces, axis=1).ravel()
    best = np.sort(each)[::-1]
    most = best[: int(pages)].sum() + (pages % 1) * (
        best[int(pages)] if int(pages) < best.size else 0
    )
    assert (lengths * prevented).sum() == pytest.approx(most)
