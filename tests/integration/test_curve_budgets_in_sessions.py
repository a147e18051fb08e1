"""Budgets that are shared by the loss curves of a profile go only to heads that can hold them, and
a saved session continues with the same logits.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import EntropyProfile, OwnPolicy, Session
from entropykv.model.geometry import read_geometry
from entropykv.profile.curves import LossCurves
from entropykv.session.memory_plan import format_plan, make_plan
from entropykv.settings.cache_options import CacheOptions
from tests.support.draft_oracles import Oracle, draft_with, held
from tests.support.logits import tokens_for
from tests.support.online_sessions import check
from tests.support.saved_sessions import assert_goes_on_from, future, session_of

BUDGET = 96
N_CTX = 2048
"""Tokens of a context so much longer than any text here that some heads get a larger budget than a
text has.
"""
WINDOW = 44
"""A recent window that fills whole pages together with four sinks, so that heads at their floor
waste no entries.
"""


def profile_of(path: Path) -> EntropyProfile:
    """Return a profile by which one KV head needs all of a text, and the others little."""
    geometry = read_geometry(path)
    n_layer, n_head = len(geometry.kv_heads_per_layer), max(geometry.heads_per_layer)
    n_head_kv = max(geometry.kv_heads_per_layer)
    error = np.full((n_layer, n_head_kv, 3), 1e-3)
    error[0, 0] = [1.0, 0.9, 0.8]
    error[1:, 1] += [3e-3, 2e-3, 1e-3]
    curves = LossCurves(N_CTX, 64, 4, 50, 1, (0, 64, 256), np.zeros_like(error), error)
    entropies = np.ones((n_layer, n_head))
    return EntropyProfile(n_layer, n_head, n_head_kv, N_CTX, entropies, curves=curves)


def of_curves(path: Path, **options: Any) -> Session:
    profile = profile_of(path)
    given = {
        "n_ctx": N_CTX,
        "policy": "profile",
        "entropy_config": profile,
        "recent_window": WINDOW,
    }
    return session_of(path, **{**given, **options})


class EvenShares(OwnPolicy):
    """Give every KV head the same share."""

    name = "even"


@pytest.mark.parametrize(
    ("options", "may_change"),
    [
        ({"policy": "profile"}, True),
        ({"policy": EvenShares()}, True),
        ({"policy": "adaptive"}, True),
        ({"policy": "uniform"}, False),
        ({"policy": "profile", "store": "device"}, False),
        ({"policy": "profile", "kv_budget": 1.0}, False),
    ],
)
def test_a_plan_says_that_a_text_may_change_its_budgets(
    uneven_llama: Path, options: dict[str, Any], may_change: bool
) -> None:
    given = {"n_ctx": N_CTX, "kv_budget": 0.3, "entropy_config": profile_of(uneven_llama)}
    text = format_plan(make_plan(uneven_llama, CacheOptions(**{**given, **options})))
    assert (", before any text is read:" in text) == may_change


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_tokens", [110, 192])
def test_a_text_fills_the_bytes(uneven_llama: Path, kv_type: str, n_tokens: int) -> None:
    """The part of a budget that a head cannot fill with a short text goes to other heads, also
    while text is written.
    """
    with of_curves(uneven_llama, kv_type=kv_type) as session:
        planned = np.array(session.cache.budgets())
        assert planned[0, 0] > n_tokens + 64
        session.decode(tokens_for(n_tokens))
        assert session.stats().entries_kept > 0.97 * BUDGET * planned.size
        for token in tokens_for(200, seed=4):
            session.decode([token])
            check(session)
            assert session.stats().entries_kept > 0.75 * BUDGET * planned.size


def test_a_head_that_needs_more_gets_what_it_can_hold(uneven_llama: Path) -> None:
    with of_curves(uneven_llama) as session:
        for n_tokens in (64, 64, 64, 5, 1, 40):
            session.decode(tokens_for(n_tokens, seed=n_tokens))
            # A page holds 16 entries.
            assert len(session.cache.entries(0, 0)) > session.position - 16
            check(session)


def test_a_head_that_needs_more_goes_on_to_fill_its_budget_behind_a_prompt(
    uneven_llama: Path,
) -> None:
    """The budget is shared again before the first token of an answer."""
    with of_curves(uneven_llama) as session:
        session.decode(tokens_for(64))
        session.decode(tokens_for(64 + 33))
        for token in tokens_for(31, seed=5):
            session.decode([token])
            # A page holds 16 entries.
            assert len(session.cache.entries(0, 0)) > session.position - 16
            check(session)


@pytest.mark.parametrize(("n_prompt", "length"), [(210, 32), (2100, 64), (4100, 128)])
def test_budgets_of_long_texts_are_shared_again_less_often(
    uneven_llama: Path, n_prompt: int, length: int
) -> None:
    """Between two times of sharing, budgets stay the same, so that drafts may be read."""
    with of_curves(uneven_llama, n_ctx=3 * n_prompt) as session:
        session.decode(tokens_for(n_prompt))
        sharing = session._slot.store.sharing  # type: ignore[attr-defined]
        budgets, changes = session.cache.budgets(), []
        for token in tokens_for(3 * length, seed=6):
            position = session.position
            assert sharing.most_drafts(position, 1000) == -(position + 1) % length
            session.decode([token])
            if session.cache.budgets() != budgets:
                changes.append(position)
            budgets = session.cache.budgets()
        first = -(-n_prompt // length) * length
        assert set(changes) <= {n_prompt, *range(first, n_prompt + 3 * length, length)}


@pytest.mark.parametrize("n_prompt", [150, 190, 210])
@pytest.mark.parametrize("n_ctx", [N_CTX, 384])
def test_an_answer_goes_on_equally_from_everywhere(
    uneven_llama: Path, n_prompt: int, n_ctx: int
) -> None:
    """An answer continues equally from every saved position, though budgets change with the length
    of the text.
    """
    opened = partial(of_curves, uneven_llama, n_ctx=n_ctx)
    assert_goes_on_from(opened, n_prompt, 140, (0, 1, 31, 63, 64, 65, 130), 70)


def test_a_loaded_session_goes_on_as_saved(uneven_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ekv"
    with of_curves(uneven_llama) as session:
        session.decode(tokens_for(200))
        list(session.generate([7], 30))
        session.files.save(file)
        expected = (future(session), session.files.save_state())
    for read_before in (0, 120):
        with of_curves(uneven_llama) as session:
            if read_before:  # Loading discards this text.
                session.decode(tokens_for(read_before, seed=8))
            session.files.load(file)
            assert session.files.save_state() == file.read_bytes()
            assert (future(session), session.files.save_state()) == expected


def test_a_text_is_the_same_with_drafts_and_without(pool_llama: Path) -> None:
    """A draft is never read with other budgets than a token without drafts at its position."""
    prompt = tokens_for(130)
    with of_curves(pool_llama, spec_type="ngram") as session:
        session.reader.drafting = None
        answer = list(session.generate(prompt, 250))
        expected, logits = held(session), session.logits
    for seed in range(2):
        with of_curves(pool_llama, spec_type="ngram") as session:
            drafting = draft_with(session, Oracle([*prompt, *answer], seed))
            assert list(session.generate(prompt, 250)) == answer
            assert held(session) == expected
            np.testing.assert_array_equal(session.logits, logits)
            assert 0 < drafting.counts.accepted < drafting.counts.drafted


def test_every_number_of_threads_gives_the_same_numbers(uneven_llama: Path) -> None:
    results = []
    for n_threads in (1, 2, 3):
        with of_curves(uneven_llama, n_threads=n_threads) as session:
            rows = session.decode(tokens_for(200), all_logits=True)
            for token in tokens_for(70, seed=2):
                session.decode([token])
            results.append((rows.tobytes(), session.files.save_state()))
    assert results[0] == results[1] == results[2]
