"""Impossible arguments of the extension raise ValueError, and the store is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from entropykv import _core

N_HEAD, N_HEAD_KV, DIM = 4, 2, 16
MAX_TOKENS = 32
MOST = 2**30
Store = _core.HeadwiseStore


def store_of(readers: int = 2, **changes: Any) -> Store:
    layers = changes.pop("layers", None) or [
        _core.LayerShape(N_HEAD, N_HEAD_KV, DIM, DIM, readers=readers),
        _core.LayerShape(N_HEAD, 1, DIM, DIM),
    ]
    arguments: dict[str, Any] = {
        "importance": _core.ImportanceSettings(_core.ScoreKind.mass),
        "n_sinks": 2,
        "recent_window": 4,
        "max_tokens": MAX_TOKENS,
        "max_entries": 100,
        "n_threads": 1,
    }
    store = Store(layers, "f16", **(arguments | changes))
    if not changes:
        store.set_budgets([40] * 3, 12, 2, 4)
    return store


def rows(n_tokens: int, heads: int, dim: int = DIM) -> Any:
    return np.random.default_rng(n_tokens).standard_normal((n_tokens, heads, dim), np.float32)


def attend(store: Store, n_tokens: int, **changes: Any) -> Any:
    arguments = {
        "layer": 0,
        "q": rows(n_tokens, N_HEAD),
        "k": rows(n_tokens, N_HEAD_KV),
        "v": rows(n_tokens, N_HEAD_KV),
        "scale": 0.25,
        "position": 0,
    }
    return store.attend_alone(**(arguments | changes))


NO_KEYS = {"k": None, "v": None}
ROWS = (("q", N_HEAD), ("k", N_HEAD_KV), ("v", N_HEAD_KV))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": -1},
        {"layer": 2},
        {"layer": 10**6},
        {"q": np.zeros(5, np.float32)},
        {"q": np.zeros((), np.float32)},
        {"q": rows(5, N_HEAD + 1)},
        {"q": np.zeros((0, N_HEAD, DIM), np.float32), "k": rows(0, 2), "v": rows(0, 2)},
        {name: rows(MAX_TOKENS + 1, heads) for name, heads in ROWS},
        {"k": rows(6, N_HEAD_KV)},
        {"v": rows(5, N_HEAD_KV, DIM + 1)},
        {"v": None},
        NO_KEYS,
        {"reader": -1},
        {"reader": 2, **NO_KEYS},
        {"position": -1},
        {"position": MOST - 4},
        {"position": 2**31 - 1},
        {"sinks": np.zeros(N_HEAD - 1, np.float32)},
        {"slopes": np.zeros(N_HEAD + 1, np.float32)},
    ],
)
def test_a_micro_batch_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    store, untouched = store_of(), store_of()
    for each in (store, untouched):
        attend(each, 20)
        attend(each, 20, reader=1, **NO_KEYS)
    with pytest.raises(ValueError, match=r"."):
        attend(store, 5, **changes)
    np.testing.assert_array_equal(attend(store, 5, position=20), attend(untouched, 5, position=20))


def test_readers_attend_in_order_and_to_the_same_tokens() -> None:
    store = store_of()
    with pytest.raises(ValueError, match="one after the other"):
        attend(store, 5, reader=1, **NO_KEYS)
    attend(store, 5)
    with pytest.raises(ValueError, match="the same tokens"):
        attend(store, 6, reader=1, **NO_KEYS)
    attend(store, 5, reader=1, **NO_KEYS)
    with pytest.raises(ValueError, match="one after the other"):
        attend(store, 5, reader=1, **NO_KEYS)


PLACES: list[Callable[[Store, int, int], object]] = [
    Store.positions,
    Store.importance,
    Store.rows,
    Store.budget,
    Store.count,
    Store.frozen_positions,
    Store.state_bytes,
    Store.save_head,
    lambda store, layer, head: store.load_head(layer, head, 0, bytearray()),
    lambda store, layer, _: store.queries(layer),
    lambda store, layer, _: store.row_entropies(layer),
    lambda store, layer, _: store.entropies(layer),
    lambda store, layer, _: store.state_problem(layer, 0, bytearray(), 0),
]


@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize(("layer", "head"), [(-1, 0), (2, 0), (10**6, 0), (0, -1), (0, 2), (1, 1)])
def test_a_layer_or_head_that_is_not_there_is_named(place: int, layer: int, head: int) -> None:
    store = store_of()
    store.track_entropy(on=True)
    store.capture_queries(on=True)
    attend(store, 5)
    if place > 8 and 0 <= layer < 2:  # This function takes only a layer.
        return
    with pytest.raises(
        ValueError, match=r"layer -?\d+ of a store of 2|KV head -?\d+ of a layer of"
    ):
        PLACES[place](store, layer, head)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": MOST + 1},
        {"max_entries": 0},
        {"max_entries": 2**31 - 1},
        {"n_sinks": -1},
        {"n_sinks": MOST + 1},
        {"recent_window": -1},
        {"recent_window": 2**31 - 1},
        {"layers": [_core.LayerShape(3, 2, DIM, DIM)]},
        {"layers": [_core.LayerShape(2, 2, 2**30, DIM)]},
        {"layers": [_core.LayerShape(2, 2, -DIM, DIM)]},
        {"layers": [_core.LayerShape(2, 2, DIM, DIM, window=2**31 - 1)]},
        {"importance": _core.ImportanceSettings(_core.ScoreKind.mass, decay=float("nan"))},
        {"importance": _core.ImportanceSettings(_core.ScoreKind.mass, decay=1.5)},
        {"importance": _core.ImportanceSettings(_core.ScoreKind.mass, observation_window=0)},
    ],
)
def test_a_store_that_cannot_be_is_not_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        store_of(**changes)


def test_entries_are_not_adopted_from_no_file() -> None:
    no_file: Any = None
    with pytest.raises(TypeError, match="incompatible function arguments"):
        store_of().adopt(no_file, [], [])


def test_numbers_beyond_all_limits_are_refused() -> None:
    store = store_of()
    for n_sinks, recent in ((-1, 4), (2, -1), (MOST + 1, 4), (2, 2**31 - 1), (MOST, MOST)):
        with pytest.raises(ValueError, match=r"."):
            store.set_budgets([40] * 3, 12, n_sinks, recent)
    with pytest.raises(ValueError, match="addresses"):
        store.set_budgets([40] * 3, 2**63, 2, 4)
    with pytest.raises(ValueError, match="begin at 0"):
        store.truncate(-1)
    with pytest.raises(ValueError, match=r"2\^30"):
        store.begin(1, MOST, MOST)
    for n_tokens, position in ((0, 0), (MAX_TOKENS + 1, 0), (4, -1)):
        with pytest.raises(ValueError, match=r"."):
            store.begin(n_tokens, position, 0)
    for budgets in ([40] * 2, [40, 40, -5]):
        with pytest.raises(ValueError, match=r"."):
            store.set_budgets(budgets, 12, 2, 4)
    for entries, per_page in ((10, 0), (10, -1), (2**31 - 1, 16)):
        with pytest.raises(ValueError, match="pages hold"):
            _core.pages_for(entries, per_page)
    with pytest.raises(ValueError, match="head size"):
        _core.page_geometry([_core.LayerShape(1, 1, 2**30, 16)], "f16")
    attend(store, 5)


def test_scratch_is_counted_and_follows_budgets() -> None:
    small, long = (store_of(max_entries=n, readers=1) for n in (1000, MOST))
    for store in (small, long):
        store.set_budgets([200] * 3, 39, 2, 4)
        attend(store, MAX_TOKENS)
    assert 0 < small.scratch_bytes == long.scratch_bytes
    before = long.scratch_bytes
    long.set_budgets([100_000] * 3, 3 * 6250, 2, 4)
    assert long.scratch_bytes > before + 100_000 * 4
    long.set_budgets([200] * 3, 39, 2, 4)
    assert long.scratch_bytes <= before
