"""Pictures of the cache show what the session holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session
from entropykv.server.page.kv_stream import Window
from entropykv.store.headwise import HeadwiseStore


def shares(positions: Any, first: int, per_column: int, n_columns: int) -> Any:
    """Return for each column the fraction of held positions, in units of 1/255, rounded up."""
    counts = [
        sum(first + i * per_column <= p < first + (i + 1) * per_column for p in positions)
        for i in range(n_columns)
    ]
    return np.ceil(255 * np.array(counts) / per_column).astype(np.uint8)


def frozen_of(session: Session) -> list[set[int]]:
    store = session._slot.store
    assert isinstance(store, HeadwiseStore)
    return [
        set(store.core.frozen_positions(layer, head).tolist())
        for layer, heads in enumerate(session.cache.budgets())
        for head in range(len(heads))
    ]


def held_by(session: Session) -> list[set[int]]:
    return [
        set(session.cache.entries(layer, head).tolist())
        for layer, heads in enumerate(session.cache.budgets())
        for head in range(len(heads))
    ]


@pytest.mark.parametrize(
    ("first", "per_column", "n_columns"), [(0, 8, 40), (37, 1, 30), (64, 3, 5)]
)
def test_a_map_shows_what_is_held_frozen_and_back(
    tiny_llama: Path, first: int, per_column: int, n_columns: int
) -> None:
    random = np.random.default_rng(3)
    came_back = 0
    with Session(tiny_llama, n_ctx=512, kv_budget=48, freeze="ram", n_threads=1) as session:
        look, was_frozen = session.cache.map(), [set[int]()] * 6
        for _ in range(12):
            session.decode(random.integers(0, session.model.n_vocab, 24).tolist())
            held, frozen, restored = look(first, per_column, n_columns)
            for row, positions in enumerate(held_by(session)):
                back = positions & was_frozen[row]
                came_back += len(back)
                for plane, expected in (
                    (held, positions),
                    (frozen, frozen_of(session)[row]),
                    (restored, back),
                ):
                    columns = shares(expected, first, per_column, n_columns)
                    np.testing.assert_array_equal(plane[row], columns)
            was_frozen = frozen_of(session)
    assert came_back > 0, "nothing came back: the test shows nothing"


def test_of_a_flat_store_there_is_one_row(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=512, kv_budget=40, store="flat", n_threads=1) as session:
        session.decode(list(range(200)))
        held, frozen, restored = session.cache.map()(0, 4, 50)
        expected = shares(session.cache.entries(0, 0).tolist(), 0, 4, 50)
    np.testing.assert_array_equal(held, expected[np.newaxis])
    assert not frozen.any()
    assert not restored.any()


@pytest.mark.parametrize(
    ("window", "position", "expected"),
    [
        (Window(0, None, 512), 0, (0, 1, 1)),
        (Window(0, None, 512), 512, (0, 1, 512)),
        (Window(0, None, 512), 513, (0, 2, 257)),
        (Window(0, None, 512), 131072, (0, 256, 512)),
        (Window(100, 200, 512), 131072, (100, 1, 100)),
        (Window(100, 5000, 64), 131072, (100, 128, 39)),
        (Window(500, 600, 64), 300, (300, 1, 1)),
    ],
)
def test_columns_are_of_a_power_of_two(
    window: Window, position: int, expected: tuple[int, int, int]
) -> None:
    assert window.fit(position) == expected
