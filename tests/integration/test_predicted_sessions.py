"""Sessions rank entries by predicted scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session
from entropykv.session.second_readings import Echo
from entropykv.store.step import Part
from tests.support.learnt import store_of
from tests.support.logits import tokens_for

TOKENS = tokens_for(700)
INSIDE: dict[str, Any] = {"n_ctx": 1024, "kv_budget": 0.2, "n_threads": 1}


def predict(session: Session, seed: int = 0) -> None:
    """Give the session's model random linear functions as its predictor."""
    prediction = store_of(session).learning
    random = np.random.default_rng(seed)
    prediction.set_predictor(
        [
            random.standard_normal((shape.n_head_kv, n), np.float32) * np.float32(0.1)
            for shape, n in zip(store_of(session).layers, prediction.n_features, strict=True)
        ]
    )


@pytest.mark.parametrize(
    "policy", ["uniform:predicted", "adaptive:predicted+values", "adaptive:mass+values+predicted"]
)
def test_a_saved_session_goes_on_as_the_one_that_was_saved(
    tiny_llama: Path, tmp_path: Path, policy: str
) -> None:
    with Session(tiny_llama, policy=policy, **INSIDE) as session:
        predict(session)
        session.decode(TOKENS)
        assert session.stats().evictions > 0
        session.files.save(tmp_path / "saved")
        expected = session.decode(TOKENS[:40])
    with Session(tiny_llama, policy=policy, **INSIDE) as session:
        predict(session)
        session.files.load(tmp_path / "saved")
        np.testing.assert_array_equal(session.decode(TOKENS[:40]), expected)


def test_other_functions_keep_other_entries(tiny_llama: Path) -> None:
    kept = []
    for seed in (1, 1, 2):
        with Session(tiny_llama, policy="uniform:predicted", **INSIDE) as session:
            predict(session, seed)
            session.decode(TOKENS)
            kept.append(store_of(session).entries(0, 0).tolist())
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize("freeze", [None, "ram"])
def test_no_window_takes_more_than_half_of_a_head_unless_entries_are_frozen(
    uneven_llama: Path, freeze: str | None
) -> None:
    """Heads with small budgets keep fewer of the newest tokens than the window, but their half."""
    policy = "adaptive:mass+values+predicted"
    with Session(uneven_llama, policy=policy, freeze=freeze, **INSIDE) as session:
        predict(session)
        session.decode(TOKENS)
        store = store_of(session)
        newest = [
            session.position - max(set(range(session.position)) - set(entries.tolist())) - 1
            for layer, shape in enumerate(store.layers)
            for entries in (session.cache.entries(layer, h) for h in range(shape.n_head_kv))
        ]
        assert min(newest) >= store.reach().recent_window
        assert (min(newest) < store.sharing.plan.protection.recent_window) == (freeze is None)


def test_echoes_of_a_text_teach_and_raise_shares(tiny_llama: Path) -> None:
    shares = []
    for echoes in (True, False):
        with Session(tiny_llama, policy="adaptive:mass+predicted", **INSIDE) as session:
            predict(session)
            # A running fit would end the collection of lessons.
            session._runner.second_readings.fit = None
            prediction = store_of(session).learning
            prediction.collect_lessons(on=True)
            read_with_echoes(session, TOKENS[:160], echoes=echoes)
            lessons = list(prediction.lessons())
            shares.append(store_of(session)._store.predicted_shares(0, 0))
            read_with_echoes(session, TOKENS[160:], echoes=echoes)
            whole = list(prediction.lessons())
            assert session.stats().evictions > 0
        n_sinks = 4
        for (count, _), (of_whole, sums), n in zip(
            lessons, whole, prediction.n_features, strict=True
        ):
            assert (count, of_whole) == ((160 - n_sinks, 700 - n_sinks) if echoes else (0, 0))
            np.testing.assert_array_equal(sums[:, n - 1, n - 1], of_whole)
            assert (np.linalg.eigvalsh(sums) > -1e-3 * (1 + of_whole)).all()
    shown, predicted = shares
    assert (shown >= predicted).all()
    assert (shown > predicted).any()


def read_with_echoes(session: Session, tokens: list[int], *, echoes: bool) -> None:
    """Read a text as calibration does, in chunks; with `echoes`, each is followed by its echo."""
    echo = Echo(lambda text: session.tokenize(text, add_bos=False), session.config.n_ubatch)
    sequence = session._slot.text
    for first in range(0, len(tokens), echo.chunk):
        chunk = tokens[first : first + echo.chunk]
        echoed = echo.of(sequence.tokens, chunk) if echoes else []
        session.reader._decode(
            Part(session._slot.store, chunk, sequence.position, 0, echoed), first
        )
        sequence.add(chunk, None, is_prompt=True)
        session._slot.broken = False
