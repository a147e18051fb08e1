"""Generation reads ahead and goes back to write tokens again, in sessions that freeze nothing."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from entropykv import Session
from entropykv.session.recovery import Climb
from entropykv.settings.freezing import Recovery
from tests.support.climbs import ClimbCounts
from tests.support.logits import tokens_for

N_TOKENS = 40
READS_AHEAD = Recovery(warm_up=10**6)
REWALKS = Recovery(smooth=1, deviations=0.01, warm_up=2, memory=8, refractory=0, calm=100)


class Recovering(Session):
    """Use a recovery ladder in a session without frozen entries, whose thaw() restores nothing."""

    recovery: Recovery | None = None

    def __init__(self, model: Path, recovery: Recovery | None, **options: Any) -> None:
        super().__init__(model, n_ctx=256, n_threads=1, **options)
        self.recovery = recovery
        self.climb_counts = ClimbCounts()
        self.cache.thaw = lambda *_: 0  # type: ignore[method-assign]

    def note_climb(self, climb: Climb) -> None:
        self.climb_counts.note(climb)


stores = pytest.mark.parametrize("store", ["headwise", "flat"])


@stores
@pytest.mark.parametrize("n_stop", [1, 7, 8, 9, N_TOKENS, None])
def test_a_stopped_session_goes_on_as_one_that_did_not_read_ahead(
    tiny_llama: Path, store: str, n_stop: int | None
) -> None:
    def generated(recovery: Recovery | None) -> tuple[list[int], int, int, list[int]]:
        with Recovering(tiny_llama, recovery, store=store) as session:
            with closing(session.generate(tokens_for(20), N_TOKENS)) as stream:  # type: ignore[type-var]
                first = list(itertools.islice(stream, n_stop))
            position, n_generated = session.position, session.stats().generated_tokens
            return first, position, n_generated, list(session.generate(first[-1:], 20))

    assert generated(READS_AHEAD) == generated(None)


@stores
@pytest.mark.parametrize("repeat_penalty", [1.0, 1.2])
def test_a_rewalk_that_restored_nothing_writes_the_same_again(
    tiny_llama: Path, store: str, repeat_penalty: float
) -> None:
    def generated(recovery: Recovery | None) -> list[int]:
        with Recovering(tiny_llama, recovery, store=store) as session:
            found = list(
                session.generate(tokens_for(20), 2 * N_TOKENS, repeat_penalty=repeat_penalty)
            )
            assert session.tokens == [*tokens_for(20), *found[:-1]]
            assert (session.climb_counts.rewalk > 1) == (recovery is not None)
            return found

    assert generated(REWALKS) == generated(None)


def test_a_generator_may_outlive_its_session(tiny_llama: Path) -> None:
    with Recovering(tiny_llama, READS_AHEAD) as session:
        stream = session.generate(tokens_for(20), N_TOKENS)
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert next(stream, None) is None
