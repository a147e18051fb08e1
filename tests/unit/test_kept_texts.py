"""Texts outside the pool obey their limits of bytes and files, and leave in the right order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv.errors import PoolError, SettingsError
from entropykv.session.kept_texts import InPool, KeptText, KeptTexts, Outside
from entropykv.session.reuse import Demand
from entropykv.session.sequence import TokenSequence
from entropykv.store.protocol import SavedState, StoreState

SECTIONS = [b"first", b"", b"the third one"]


def state() -> StoreState:
    sizes = [len(section) for section in SECTIONS]
    return StoreState([[1, 2]], 3, sizes, iter(SECTIONS), recalls_now=True, whole_from=9)


def text(n_tokens: int = 17) -> TokenSequence:
    return TokenSequence(8, range(n_tokens))


def saved(kept: KeptText) -> SavedState:
    assert isinstance(kept.tier, Outside)
    return kept.tier.saved()


def put(kept_texts: KeptTexts, n_tokens: int = 17, *, is_checkpoint: bool = False) -> KeptText:
    kept = KeptText(text(n_tokens), is_checkpoint)
    return kept_texts.put(kept, n_tokens, 4, state())


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_parked_comes_back_as_often_as_it_is_taken(on_disk: bool, tmp_path: Path) -> None:
    kept_texts = KeptTexts(f"disk:{tmp_path}" if on_disk else "ram")
    swapped = put(kept_texts)
    assert kept_texts.swapped_bytes == sum(map(len, SECTIONS))
    assert kept_texts.swapped_out == [swapped]
    for _ in range(2):
        taken = saved(swapped)
        assert [bytes(section) for section in taken.sections] == SECTIONS
        assert (taken.position, taken.shift, taken.evicted, taken.entries) == (17, 4, 3, [[1, 2]])
        assert taken.recalls_now
        assert taken.whole_from == swapped.tier.state.whole_from == 9
        taken.sections[0][:1] = b"F"  # The code that loads the text may change its sections.
    # The file was unlinked, so that the directory shows nothing.
    assert list(tmp_path.iterdir()) == []
    copy = kept_texts.copy(swapped, KeptText(text()))
    assert saved(copy) == saved(swapped)
    assert kept_texts.swapped_bytes == 2 * sum(map(len, SECTIONS))
    kept_texts.drop(swapped)  # The copy shares the bytes, and keeps them.
    assert [bytes(section) for section in saved(copy).sections] == SECTIONS
    kept_texts.drop(copy)
    assert kept_texts.swapped_bytes == len(kept_texts.swapped_out) == 0


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_limit_is_never_exceeded(where: str, tmp_path: Path) -> None:
    n_bytes = sum(map(len, SECTIONS))
    kept_texts = KeptTexts("ram" if where == "ram" else f"disk:{tmp_path}", n_bytes * 2)
    kept = [put(kept_texts) for _ in range(2)]
    with pytest.raises(PoolError, match="more than the limit"):
        put(kept_texts)
    assert kept_texts.swapped_bytes == 2 * n_bytes
    kept_texts.drop(kept.pop())
    kept.append(put(kept_texts))
    for swapped in kept:
        kept_texts.drop(swapped)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    kept_texts = KeptTexts(f"disk:{tmp_path}")
    swapped = put(kept_texts)
    assert isinstance(swapped.tier, Outside)
    assert not isinstance(swapped.tier.sections, list)
    swapped.tier.sections.truncate(3)
    with pytest.raises(PoolError, match="cannot be read"):
        saved(swapped)
    kept_texts.drop(swapped)


@pytest.mark.parametrize(
    ("where", "limit"),
    [("nowhere", None), ("disk:", None), ("disk:/no/such", None), ("ram", 0), ("ram", "much")],
)
def test_impossible_places_and_limits_are_refused(where: str, limit: str | int | None) -> None:
    with pytest.raises(SettingsError):
        KeptTexts(where, limit)


class Pages:
    """Stand in for pages of the pool."""

    shift = 4
    n_bytes = 2
    n_pages = 3
    is_lost = False

    def __init__(self) -> None:
        self.are_held = True

    def drop(self) -> None:
        self.are_held = False


def hold(kept_texts: KeptTexts, n_tokens: int, *, is_checkpoint: bool) -> KeptText:
    pages: Any = Pages()
    kept = KeptText(text(n_tokens), is_checkpoint)
    return kept_texts.keep(kept, InPool.of(n_tokens, pages, lambda _: state()))


def are_held(kept: KeptText) -> bool:
    return isinstance(kept.tier, InPool)


def test_checkpoints_leave_the_pool_before_idle_sessions_each_by_their_last_use() -> None:
    kept_texts = KeptTexts(checkpoint_limit=1 << 20)
    idle = [hold(kept_texts, n, is_checkpoint=False) for n in (30, 31)]
    checkpoints = [hold(kept_texts, n, is_checkpoint=True) for n in (40, 41)]
    found, position = kept_texts.nearest(range(40), None, Demand(is_cut=False))
    # The checkpoint is used last here; it serves 39 of 40 tokens, because its logits are not known.
    assert (found, position) == (checkpoints[0], 39)
    turns = [checkpoints[1], checkpoints[0], *idle]
    for n_left in range(1, 5):
        assert kept_texts.make_room()
        assert [are_held(each) for each in turns] == [n >= n_left for n in range(4)]
    assert not kept_texts.make_room()
    taken = saved(idle[0])
    assert (taken.position, taken.shift) == (30, 4)
    assert idle[0].n_bytes == sum(map(len, SECTIONS))
    assert idle[0].n_pages == 0
    for each in turns:
        kept_texts.drop(each)


def test_one_that_is_swapped_in_stays_in_the_pool_meanwhile() -> None:
    kept_texts = KeptTexts()
    first, second = (hold(kept_texts, n, is_checkpoint=False) for n in (30, 31))
    with kept_texts.staying(first):
        assert kept_texts.make_room()
        assert not kept_texts.make_room()
    assert (are_held(first), are_held(second)) == (True, False)


def test_a_checkpoint_without_room_elsewhere_is_dropped() -> None:
    of_text = text(40).n_bytes
    kept_texts = KeptTexts(checkpoint_limit=of_text + 2 + 5)
    kept = hold(kept_texts, 40, is_checkpoint=True)
    pages: Any = kept.tier.pages if isinstance(kept.tier, InPool) else None
    assert kept.n_bytes == of_text + 2
    assert kept_texts.make_room()
    assert not pages.are_held
    assert kept_texts.checkpoints == []


def test_a_checkpoint_that_is_too_large_alone_drops_no_other() -> None:
    kept_texts = KeptTexts(checkpoint_limit=text(40).n_bytes + 1)
    small = hold(kept_texts, 4, is_checkpoint=True)
    with pytest.raises(PoolError, match="more than the limit"):
        hold(kept_texts, 40, is_checkpoint=True)
    assert kept_texts.checkpoints == [small]


def test_a_checkpoint_replaces_the_earlier_one_of_the_same_text() -> None:
    kept_texts = KeptTexts(checkpoint_limit=1 << 20)
    put(kept_texts, is_checkpoint=True)
    second = put(kept_texts, is_checkpoint=True)
    longer = put(kept_texts, 18, is_checkpoint=True)
    idle = put(kept_texts)
    assert kept_texts.checkpoints == [second, longer]
    assert kept_texts.swapped_out == [idle]
    assert kept_texts.nearest([5], None, Demand()) == (None, 0)
    kept_texts.drop_checkpoints()
    assert kept_texts.nearest(range(17), None, Demand()) == (None, 0)
    assert kept_texts.swapped_out == [idle]
