"""Idle sequences are swapped out: bytes, limits, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv.errors import PoolError, SettingsError
from entropykv.session.swap_space import SwapSpace
from entropykv.store.states import StoreState

SECTIONS = [b"first", b"", b"the third one"]


def state() -> StoreState:
    sizes = [len(section) for section in SECTIONS]
    return StoreState([[1, 2]], 3, sizes, iter(SECTIONS), recalls_now=True, whole_from=9)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_parked_comes_back_as_often_as_it_is_taken(on_disk: bool, tmp_path: Path) -> None:
    swap_space = SwapSpace(f"disk:{tmp_path}" if on_disk else "ram")
    swapped = swap_space.put(17, 4, state())
    assert swap_space.bytes == sum(map(len, SECTIONS))
    assert swap_space.count == 1
    for _ in range(2):
        taken = swap_space.take(swapped)
        assert [bytes(section) for section in taken.sections] == SECTIONS
        assert (taken.position, taken.shift, taken.evicted, taken.entries) == (17, 4, 3, [[1, 2]])
        assert taken.recalls_now
        assert taken.whole_from == swapped.whole_from == 9
        taken.sections[0][:1] = b"F"  # The code that loads it may change it.
    assert list(tmp_path.iterdir()) == []  # The file has no name.
    copy = swap_space.copy(swapped)
    assert swap_space.take(copy) == swap_space.take(swapped)
    swap_space.drop(copy)
    swap_space.drop(swapped)
    assert swap_space.bytes == swap_space.count == 0


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_limit_is_never_exceeded(where: str, tmp_path: Path) -> None:
    n_bytes = sum(map(len, SECTIONS))
    swap_space = SwapSpace("ram" if where == "ram" else f"disk:{tmp_path}", n_bytes * 2)
    kept = [swap_space.put(1, 0, state()) for _ in range(2)]
    with pytest.raises(PoolError, match="more than the limit"):
        swap_space.put(1, 0, state())
    assert swap_space.bytes == 2 * n_bytes
    swap_space.drop(kept.pop())
    kept.append(swap_space.put(1, 0, state()))
    for swapped in kept:
        swap_space.drop(swapped)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    swap_space = SwapSpace(f"disk:{tmp_path}")
    swapped = swap_space.put(1, 0, state())
    assert swapped.file is not None
    swapped.file.truncate(3)
    with pytest.raises(PoolError, match="cannot be read"):
        swap_space.take(swapped)
    swap_space.drop(swapped)


@pytest.mark.parametrize(
    ("where", "limit"),
    [("nowhere", None), ("disk:", None), ("disk:/no/such", None), ("ram", 0), ("ram", "much")],
)
def test_impossible_places_and_limits_are_refused(where: str, limit: str | int | None) -> None:
    with pytest.raises(SettingsError):
        SwapSpace(where, limit)
