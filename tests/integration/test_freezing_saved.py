"""Sessions with cold storage can be saved, and can go beyond the trained context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Freezing, Rung, Session
from entropykv.settings.options import KV_TYPES
from tests.support.freeze_and_restore import frozen_entries
from tests.support.frozen_sessions import (
    check_all_is_there,
    least_limit,
    session_of,
    where,
)
from tests.support.logits import tokens_for
from tests.support.saved_sessions import all_entries, assert_load_refused
from tests.support.tiny_models import write_llama

ON_DISK = [
    ("uniform", "ram"),
    ("uniform", "disk"),
    ("rolling-freeze", "ram"),
    ("rolling-freeze", "disk"),
]


def after(session: Session) -> tuple[Any, ...]:
    """Return everything that can be observed of a session, now and after further tokens."""
    state = (session.position, session.tokens, all_entries(session), frozen_entries(session))
    rows = session.decode(tokens_for(70, seed=9), all_logits=True)
    single = [session.decode([token]).tobytes() for token in tokens_for(30, seed=8)]
    return (*state, rows.tobytes(), single, all_entries(session), frozen_entries(session))


@pytest.mark.parametrize(("policy", "place"), ON_DISK)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_saved_session_goes_on_with_what_was_frozen(
    tiny_llama: Path, tmp_path: Path, policy: str, place: str, kv_type: str
) -> None:
    options = {"policy": policy, "kv_type": kv_type, "kv_budget": 40}
    with session_of(tiny_llama, freeze=where(place, tmp_path), **options) as session:
        session.decode(tokens_for(200))
        list(session.generate([7], 30))
        assert session.stats().frozen_entries > 0
        session.files.save(tmp_path / "x.ekv")
        expected = after(session)
    with session_of(tiny_llama, freeze=where(place, tmp_path), **options) as session:
        session.decode(tokens_for(120, seed=8))  # Loading discards these tokens.
        session.files.load(tmp_path / "x.ekv")
        check_all_is_there(session)
        assert after(session) == expected
    with session_of(tiny_llama, freeze="ram", **{**options, "kv_budget": 24}) as session:
        session.files.load(tmp_path / "x.ekv")
        check_all_is_there(session)
        assert all(len(entries) <= 24 for entries in all_entries(session))
        session.decode(tokens_for(80))
        check_all_is_there(session)


def test_a_saved_session_looks_for_what_thaw_asks(tiny_llama: Path) -> None:
    sessions = [session_of(tiny_llama, kv_budget=40) for _ in range(2)]
    with sessions[0] as session, sessions[1] as other:
        session.decode(tokens_for(201))
        plain = session.files.save_state()
        session.cache.thaw(Rung.SOFT)
        other.files.load_state(session.files.save_state())
        assert other._slot.store.cold.recalls_now
        expected = (session.decode([7]).tobytes(), all_entries(session))
        assert (other.decode([7]).tobytes(), all_entries(other)) == expected
        assert not other._slot.store.cold.recalls_now
        other.cache.thaw()
        other.files.load_state(plain)
        assert not other._slot.store.cold.recalls_now


@pytest.mark.parametrize("policy", ["uniform", "rolling-freeze"])
def test_a_smaller_limit_drops_on_loading(tiny_llama: Path, policy: str) -> None:
    least = least_limit(tiny_llama)
    with session_of(tiny_llama, policy=policy, kv_budget=60) as session:
        session.decode(tokens_for(400))
        for token in tokens_for(40):
            session.decode([token])
        assert session.stats().entries_recalled > 0
        data = session.files.save_state()
    freezing = Freezing(limit=least)
    with session_of(tiny_llama, policy=policy, kv_budget=60, freeze=freezing) as session:
        session.files.load_state(data)
        assert session.stats().frozen_bytes <= least
        check_all_is_there(session)
        for token in tokens_for(60):
            session.decode([token])
            check_all_is_there(session)


def test_other_frozen_types_and_sessions_that_do_not_freeze(tiny_llama: Path) -> None:
    with session_of(tiny_llama, kv_type="f16") as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
    for freeze in (None, Freezing(kv_type="q8_0")):
        with session_of(tiny_llama, kv_type="f16", freeze=freeze) as session:
            session.decode(tokens_for(20))
            assert_load_refused(session, data, "--freeze")


@pytest.mark.parametrize("policy", ["uniform", "rolling-freeze"])
def test_long_texts_go_on_beyond_the_trained_context(tmp_path: Path, policy: str) -> None:
    model = tmp_path / "short.gguf"
    write_llama(model, head_dim=32, n_ctx_train=256, weight_type="F32")
    with session_of(model, n_ctx=1024, n_ubatch=32, policy=policy) as session:
        rows = session.decode(tokens_for(900), all_logits=True)
        assert np.isfinite(rows).all()
        assert session.stats().rebases > 0
        assert session.stats().entries_recalled > 0
        check_all_is_there(session)
