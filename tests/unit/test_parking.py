"""Where idle sequences are kept: bytes, limits, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv.errors import PoolError, SettingsError
from entropykv.session.parking import Parking
from entropykv.store.protocol import StoreState

SECTIONS = [b"first", b"", b"the third one"]


def state() -> StoreState:
    sizes = [len(section) for section in SECTIONS]
    return StoreState([[1, 2]], 3, sizes, iter(SECTIONS), recalls_now=True)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_parked_comes_back_as_often_as_it_is_taken(on_disk: bool, tmp_path: Path) -> None:
    parking = Parking(f"disk:{tmp_path}" if on_disk else "ram")
    parked = parking.put(17, 4, state())
    assert parking.bytes == sum(map(len, SECTIONS))
    assert parking.count == 1
    for _ in range(2):
        taken = parking.take(parked)
        assert [bytes(section) for section in taken.sections] == SECTIONS
        assert (taken.position, taken.shift, taken.evicted, taken.entries) == (17, 4, 3, [[1, 2]])
        assert taken.recalls_now
        taken.sections[0][:1] = b"F"  # whoever loads it may change it
    assert list(tmp_path.iterdir()) == []  # the file has no name
    copy = parking.copy(parked)
    assert parking.take(copy) == parking.take(parked)
    parking.drop(copy)
    parking.drop(parked)
    assert parking.bytes == parking.count == 0


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_limit_is_never_exceeded(where: str, tmp_path: Path) -> None:
    n_bytes = sum(map(len, SECTIONS))
    parking = Parking("ram" if where == "ram" else f"disk:{tmp_path}", n_bytes * 2)
    kept = [parking.put(1, 0, state()) for _ in range(2)]
    with pytest.raises(PoolError, match="more than the limit"):
        parking.put(1, 0, state())
    assert parking.bytes == 2 * n_bytes
    parking.drop(kept.pop())
    kept.append(parking.put(1, 0, state()))
    for parked in kept:
        parking.drop(parked)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    parking = Parking(f"disk:{tmp_path}")
    parked = parking.put(1, 0, state())
    assert parked.file is not None
    parked.file.truncate(3)
    with pytest.raises(PoolError, match="cannot be read"):
        parking.take(parked)
    parking.drop(parked)


@pytest.mark.parametrize(
    ("where", "limit"),
    [("nowhere", None), ("disk:", None), ("disk:/no/such", None), ("ram", 0), ("ram", "much")],
)
def test_impossible_places_and_limits_are_refused(where: str, limit: str | int | None) -> None:
    with pytest.raises(SettingsError):
        Parking(where, limit)
