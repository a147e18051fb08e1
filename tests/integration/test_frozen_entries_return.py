"""Frozen entries return to sessions in real llama.cpp."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from entropykv import Freezing, Session
from entropykv.settings.freezing import Rung
from entropykv.settings.options import KV_TYPES
from tests.support.freeze_and_restore import freeze_and_restore
from tests.support.frozen_sessions import (
    check_all_is_there,
    least_limit,
    session_of,
    where,
)
from tests.support.logits import relative_error, tokens_for
from tests.support.saved_sessions import all_entries


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bitnet"])
def test_frozen_and_restored_is_as_never_interrupted(
    model: str, kv_type: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    rows = []
    for interrupts in (False, True):
        options = {"kv_budget": 1.0, "kv_type": kv_type, "freeze": where(place, tmp_path)}
        with session_of(path, **options) as session:
            session.decode(tokens_for(150))
            if interrupts:
                freeze_and_restore(session)
            rows.append(session.decode(tokens_for(100, seed=4), all_logits=True))
            for token in tokens_for(8, seed=5):
                if interrupts:
                    freeze_and_restore(session)
                rows.append(session.decode([token]))
    half = len(rows) // 2
    np.testing.assert_array_equal(np.concatenate(rows[:half]), np.concatenate(rows[half:]))


@pytest.mark.parametrize(
    ("cold_type", "least", "most"), [("q8_0", 1e-5, 0.05), ("q4_0", 0.01, 0.7)]
)
def test_narrower_frozen_entries_come_back_nearly_the_same(
    tiny_llama: Path, cold_type: str, least: float, most: float
) -> None:
    rows = []
    for interrupts in (False, True):
        freezing = Freezing(kv_type=cold_type)
        with session_of(tiny_llama, kv_budget=1.0, kv_type="f16", freeze=freezing) as session:
            session.decode(tokens_for(150))
            if interrupts:
                freeze_and_restore(session)
            rows.append(session.decode(tokens_for(50, seed=4), all_logits=True))
    assert least < relative_error(rows[1], rows[0]) < most


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("policy", ["uniform", "rolling-freeze", "adaptive"])
def test_every_number_of_threads_gives_the_same(
    tiny_llama: Path, policy: str, place: str, tmp_path: Path
) -> None:
    results = []
    for n_threads in (1, 2, 3, 5):
        freeze = where(place, tmp_path)
        options = {"policy": policy, "n_threads": n_threads, "kv_budget": 40, "freeze": freeze}
        with session_of(tiny_llama, **options) as session:
            rows = [session.decode(tokens_for(200), all_logits=True)]
            rows += [session.decode([token]) for token in tokens_for(20, seed=5)]
            check_all_is_there(session)
            stats = session.stats()
            assert stats.entries_recalled > 0
            counters = (stats.entries_frozen, stats.entries_restored, stats.entries_recalled)
            results.append((np.concatenate(rows).tobytes(), all_entries(session), counters))
    assert results[0] == results[1] == results[2]
    assert not list(tmp_path.iterdir())


def test_resize_freezes_and_thaw_restores(tiny_llama: Path) -> None:
    with session_of(tiny_llama, kv_budget=1.0) as session:
        session.decode(tokens_for(300))
        assert session.stats().frozen_entries == 0
        session.cache.resize(60)
        check_all_is_there(session)
        assert session.cache.evicted == 0
        assert {len(entries) for entries in all_entries(session)} == {60}
        assert session.cache.thaw() == 0  # The budget has no room for more entries.
        session.cache.resize(100)
        assert session.cache.thaw() == 40 * session._slot.store.facts.n_kv_heads
        check_all_is_there(session)
        session.cache.resize(1.0)
        assert session.cache.thaw(Rung.WINDOW, window=10) > 0
        session.cache.thaw()
        assert session.stats().frozen_entries == 0
        assert all_entries(session) == [list(range(300))] * session._slot.store.facts.n_kv_heads
        session.decode(tokens_for(20))
        check_all_is_there(session)


def take_a_step(session: Session, chance: random.Random) -> None:
    match chance.choice(["decode", "decode", "tokens", "truncate", "resize", "thaw"]):
        case "decode":
            n = min(chance.randint(1, 90), session.config.n_ctx - session.position)
            session.decode(tokens_for(n, seed=n)) if n else session.reset()
        case "tokens" if session.position < session.config.n_ctx - 10:
            for token in tokens_for(10):
                session.decode([token])
        case "truncate":
            dropped = session.cache.evicted
            session.text.truncate(chance.randint(session.position * 3 // 4, session.position))
            if dropped:
                # Entries that were dropped count as evicted until the session is reset.
                session.reset()
        case "resize":
            session.cache.resize(chance.choice([24, 40, 100]))
        case "thaw":
            session.cache.thaw(chance.choice(list(Rung)), window=chance.randint(1, 50))


@pytest.mark.parametrize(
    "policy", ["uniform", "rolling-freeze", "rolling-freeze:products", "streaming"]
)
@pytest.mark.parametrize("limit_pages", [None, 2, 4])
def test_everything_is_accounted_for(
    tiny_llama: Path, policy: str, limit_pages: int | None
) -> None:
    chance = random.Random(1)
    limit = limit_pages and least_limit(tiny_llama, kv_type="f16") * limit_pages // 2
    options = {"policy": policy, "kv_type": "f16", "kv_budget": 40}
    with session_of(tiny_llama, freeze=Freezing(limit=limit), **options) as session:
        for _ in range(25):
            take_a_step(session, chance)
            assert limit is None or session.stats().frozen_bytes_peak <= limit
            if not limit:
                check_all_is_there(session)
            most = [entries for layer in session.cache.budgets() for entries in layer]
            kept = [len(entries) for entries in all_entries(session)]
            assert all(n <= budget for n, budget in zip(kept, most, strict=True))
        assert session.stats().entries_frozen > 0


def test_a_limit_drops_and_says_so(tiny_llama: Path) -> None:
    least = least_limit(tiny_llama)
    with session_of(tiny_llama, kv_budget=40, freeze=Freezing(limit=least)) as session:
        for first in range(0, 500, 50):
            session.decode(tokens_for(50, seed=first))
            check_all_is_there(session)
            assert session.stats().frozen_bytes <= least
        assert session.cache.evicted > 0
        stats = session.stats()
        assert stats.frozen_bytes_peak <= least
        assert 0 < stats.frozen_sketch_bytes < stats.frozen_bytes + least
        assert stats.frozen_overhead_bytes > 0
