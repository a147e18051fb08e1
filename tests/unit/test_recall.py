"""Recall finds the frozen entries that queries need, within the same step."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import _core
from tests.support.freeze_stores import (
    HEADS,
    KV_TYPES,
    LAYERS,
    MAX_TOKENS,
    N_SINKS,
    ONE,
    RECENT,
    Reader,
    budget_lists,
    freeze_settings,
    operations,
    pages_of,
    store_of,
)
from tests.support.reference import Options, Rules, Schedule, attend_kv_head, stored


def store_with_a_needle(
    n_read: int, budget: int, needle: int, freezing: _core.FreezeSettings
) -> tuple[_core.HeadwiseStore, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a store whose one head has read `n_read` tokens and frozen the one at `needle`, and
    all K and V that were read, (n_read, 1, 32) each.
    """
    random = np.random.default_rng(7)
    k = random.standard_normal((n_read, 1, 32), np.float32) * np.float32(0.3)
    v = random.standard_normal((n_read, 1, 32), np.float32)
    k[needle, 0] = 0.0
    k[needle, 0, 3] = 8.0
    store = store_of(Rules("streaming"), freezing, ONE)
    store.set_budgets([budget], pages_of([budget], "f16", ONE), N_SINKS, RECENT)
    q = np.zeros((MAX_TOKENS, 2, 32), np.float32)
    q[..., 3] = -1.0  # The query points away from every key but the needle.
    for first in range(0, n_read, MAX_TOKENS):
        rows = slice(first, min(first + MAX_TOKENS, n_read))
        n = rows.stop - rows.start
        store.attend_alone(0, q[:n], k[rows], v[rows], 1.0, position=first)
    assert needle in store.frozen_positions(0, 0)
    return store, k, v


@pytest.mark.parametrize("n_tokens", [1, 2, 20])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("needle", [5, 60, 190])
def test_what_a_query_looks_for_is_there_in_the_same_step(
    n_tokens: int, softcap: float, where: str, needle: int
) -> None:
    """A frozen key to which queries point is recalled in the same step; the head is not full."""
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno() if where == "disk" else -1
        freezing = freeze_settings(recall=1, descriptor=descriptor)
        store, k, v = store_with_a_needle(240, 80, needle, freezing)
        store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
        q = np.zeros((n_tokens, 2, 32), np.float32)
        q[..., 3] = 4.0
        more_k, more_v = np.full((2, n_tokens, 1, 32), 0.1, np.float32)
        output = store.attend_alone(0, q, more_k, more_v, 1.0, softcap=softcap, position=240)
        active = store.positions(0, 0)
        assert needle in active
        assert needle not in store.frozen_positions(0, 0)
        assert store.recalled_total >= 1
        assert len(active) <= 140
        k, v = np.concatenate([k, more_k]), np.concatenate([v, more_v])
        rows = (q, stored(k[active, 0], "f16"), stored(v[active, 0], "f16"), active)
        expected = attend_kv_head(*rows, 240, Options(1.0, softcap)).outputs
        np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)
        assert sorted([*active, *store.frozen_positions(0, 0)]) == list(range(240 + n_tokens))


@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize(
    ("needle", "slope", "found"), [(60, 0.05, True), (60, 0.3, False), (190, 0.3, True)]
)
def test_what_a_query_looks_for_counts_with_its_distance(
    n_tokens: int, needle: int, slope: float, found: bool
) -> None:
    """Whether a frozen key is recalled depends on its distance, too: ALiBi subtracts up to 54 from
    a logit of 32.
    """
    store, k, v = store_with_a_needle(240, 80, needle, freeze_settings(recall=1))
    store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
    slopes = np.array([slope, 2.0], np.float32)
    q = np.zeros((n_tokens, 2, 32), np.float32)
    q[..., 3] = 4.0
    more = np.full((n_tokens, 1, 32), 0.1, np.float32)
    output = store.attend_alone(0, q, more, more, 1.0, position=240, slopes=slopes)
    active = store.positions(0, 0)
    assert (needle in active) == found
    k, v = np.concatenate([k, more]), np.concatenate([v, more])
    rows = (q, stored(k[active, 0], "f16"), stored(v[active, 0], "f16"), active)
    expected = attend_kv_head(*rows, 240, Options(1.0, slopes=slopes)).outputs
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("interval", [0, 4])
def test_single_tokens_look_for_frozen_entries_at_intervals(interval: int) -> None:
    store, _, _ = store_with_a_needle(240, 80, 60, freeze_settings(recall=interval))
    store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
    q = np.zeros((1, 2, 32), np.float32)
    q[..., 3] = 4.0
    row = np.full((1, 1, 32), 0.1, np.float32)
    found = []
    for position in range(241, 249):
        store.attend_alone(0, q, row, row, 1.0, position=position)
        found.append(60 in store.positions(0, 0))
    expected = [interval > 0 and position >= 244 for position in range(241, 249)]
    assert found == expected
    store, _, _ = store_with_a_needle(240, 80, 60, freeze_settings(recall=4))
    store.set_budgets([140], pages_of([140], "f16", ONE), N_SINKS, RECENT)
    store.recalls_now = True
    store.attend_alone(0, q, row, row, 1.0, position=241)
    assert 60 in store.positions(0, 0)


@pytest.mark.parametrize("measure", [_core.ScoreKind.attention, _core.ScoreKind.mass])
def test_recall_leaves_alone_what_the_schedule_would_freeze_again(measure: _core.ScoreKind) -> None:
    """Recall leaves frozen what the schedule would freeze again: here every second entry, which
    gets little attention.
    """
    importance = _core.ImportanceSettings(measure, decay=0.998)
    freezing = freeze_settings(recall=1, schedule=_core.FreezeSchedule(4, 1.0, 2.0, 0))
    store = _core.HeadwiseStore(
        [_core.LayerShape(1, 1, 32, 32)],
        "f16",
        importance,
        N_SINKS,
        RECENT,
        1,
        80,
        1,
        freezing=freezing,
    )
    store.set_budgets([80], pages_of([80], "f16", ((1, 1, 32, 32),)), N_SINKS, RECENT)
    query = np.zeros((1, 1, 32), np.float32)
    query[..., 0] = 1.0
    for position in range(60):
        key = query * (0.0 if position % 2 else np.log(5.0))
        store.attend_alone(0, query, key, np.ones((1, 1, 32), np.float32), 1.0, position=position)
    assert store.frozen_total > 10
    assert store.recalled_total == 0


def test_queries_of_a_group_do_not_disturb_each_other() -> None:
    """Nothing is recalled for queries of a group that attend to active entries alone.

    The last page exceeds the room that a store of so few entries reserves.
    """
    shape = _core.LayerShape(2, 1, 32, 32)
    importance = _core.ImportanceSettings(_core.ScoreKind.streaming)
    store = _core.HeadwiseStore(
        [shape], "f16", importance, N_SINKS, RECENT, 1, 34, 1, freezing=freeze_settings(recall=1)
    )
    store.set_budgets([34], 3, N_SINKS, RECENT)
    row = np.zeros((1, 1, 32), np.float32)
    keys = np.zeros((40, 1, 1, 32), np.float32)
    keys[:, ..., 0] = 1.0  # Frozen keys, too, point where the queries do.
    keys[:N_SINKS, ..., 0] = 10.0
    nothing = np.zeros((1, 2, 32), np.float32)
    for position in range(40):
        store.attend_alone(0, nothing, keys[position], row, 1.0, position=position)
    assert store.count(0, 0) > 32
    before = store.recalled_total
    looking = nothing.copy()
    looking[0, :, 0] = 10.0  # Both queries attend only to the sinks.
    store.attend_alone(0, looking, row, row, 1.0, position=40)
    assert store.recalled_total == before


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("cold_type", ["as stored", "q8_0", "q4_0"])
@pytest.mark.parametrize("schedule", [None, Schedule(8, 1.0, 1.0, 0)], ids=["", "schedule"])
@pytest.mark.parametrize("where", ["ram", "disk"])
@settings(max_examples=10)
@given(
    budgets=budget_lists,
    todo=operations,
    pages=st.sampled_from([0, 2, 3, 5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_recall_loses_nothing_and_keeps_to_the_budget(
    where: str,
    schedule: Schedule | None,
    cold_type: str,
    kv_type: str,
    budgets: list[int],
    todo: list[tuple[Any, ...]],
    pages: int,
    seed: int,
) -> None:
    """After any recall, K and V belong to their positions, no entry exists twice, and budgets hold.

    `pages`: the limit of cold storage, in pages for each KV head; 0: no limit.
    """
    limit = pages and len(HEADS) * (
        _core.page_geometry(LAYERS, kv_type)[0]
        + (pages - 1) * _core.cold_page_bytes(LAYERS, kv_type, cold_type)
    )
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno() if where == "disk" else -1
        freezing = freeze_settings(
            recall=2,
            limit=limit,
            kv_type=cold_type,
            schedule=schedule and _core.FreezeSchedule(*schedule),
            descriptor=descriptor,
        )
        rules = Rules("attention", kv_type, decay=0.99, schedule=schedule)
        store = store_of(rules, freezing)
        Reader(store, rules, budgets, seed, exact=cold_type == "as stored", limit=limit).all(todo)
