"""A generation with recovery ends properly if it is stopped, fails, is interrupted, or has gone
back.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from entropykv.cli.answer import Answer, write_answer
from entropykv.errors import EntropyKVError
from entropykv.generation.prompt import GenerationRequest, Prompt
from entropykv.session.generate import generate
from entropykv.settings.recovery import Recovery, Rung
from entropykv.settings.sampling import Sampling
from tests.support.ladders import GREEDY, N_VOCAB, WARM_UP, FakeSession, planned, stopped_after


def test_stopping_after_a_decode_that_broke_the_session_raises_nothing() -> None:
    session = FakeSession(planned(set()), Recovery(), fails_at=12, breaks=True)
    yielded = stopped_after(session, 5, [1, 2, 3], 60, GREEDY)
    assert session.broken
    assert len(yielded) == 5


@dataclass
class Failing(FakeSession):
    """Stand in for a session that cannot restore entries, or cannot read again."""

    thaws_nothing: bool = False

    def thaw(self, rung: Rung, window: int) -> int:
        if self.thaws_nothing and rung is Rung.FULL:
            raise EntropyKVError("failed")
        return super().thaw(rung, window)

    def read(self, tokens: Sequence[int], all_logits: bool, **_: object) -> Iterator[None]:
        if len(self.decoded) == 35:
            raise EntropyKVError("failed")
        yield from super().read(tokens, all_logits)


@pytest.mark.parametrize(("thaws_nothing", "n_yielded"), [(True, 30 - 3), (False, 35 - 8 - 3)])
def test_the_last_yielded_token_is_not_read_where_recovery_fails(
    thaws_nothing: bool, n_yielded: int
) -> None:
    spikes = {20, 25, 30, 35}
    session = Failing(
        planned(spikes), Recovery(smooth=1, warm_up=WARM_UP), thaws_nothing=thaws_nothing
    )
    yielded: list[int] = []
    with pytest.raises(EntropyKVError, match="failed"):
        yielded.extend(generate(session, [1, 2, 3], 60, GREEDY))
    assert len(yielded) == n_yielded
    assert session.tokens == [1, 2, 3, *yielded[:-1]]


def test_penalties_after_a_rewalk_are_those_of_the_tokens_that_stayed() -> None:
    spikes = {20, 25, 30, 35}  # When the text is read again, the spikes do not occur.

    def alike(session: FakeSession) -> np.ndarray:
        logits = np.linspace(9, 10, N_VOCAB, dtype=np.float32)
        return logits * (0.001 if len(session.decoded) in spikes else 4)

    def whole(recovery: Recovery | None) -> list[int]:
        session = FakeSession(alike, recovery)
        found = stopped_after(session, None, [1, 2, 3], 50, Sampling(repeat_penalty=1.2))
        assert bool(session.climb_counts.rewalk) == (recovery is not None)
        return found

    assert whole(Recovery(smooth=1, warm_up=WARM_UP)) == whole(None)


def test_random_numbers_go_on_after_a_rewalk() -> None:
    spikes = {20, 25, 30, 35}

    def even(session: FakeSession) -> np.ndarray:
        logits = np.zeros(N_VOCAB, np.float32)
        logits[:16] = 0 if len(session.decoded) in spikes else 12
        return logits

    sampling = Sampling(temperature=1.0, top_p=1.0, seed=4)
    session = FakeSession(even, Recovery(smooth=1, warm_up=WARM_UP))
    yielded = stopped_after(session, None, [1, 2, 3], 60, sampling)
    assert session.climb_counts.rewalk == 1
    dropped = [token for _, token in session.decoded[27:35]]
    again = yielded[24:32]
    assert again != dropped
    assert again != yielded[:8]
    assert again == [token for _, token in session.decoded[36:44]]


def test_a_late_close_leaves_alone_what_was_read_since() -> None:
    session = FakeSession(planned(set()), Recovery())
    stream = generate(session, [1, 2, 3], 60, GREEDY)
    next(stream)
    session.text.truncate(2)
    list(session.reader.read(range(40, 60), all_logits=False))
    before = list(session.tokens)
    stream.close()
    assert session.tokens == before


def test_ctrl_c_leaves_one_token_unread(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeSession):
        def token_bytes(self, token: int) -> bytes:
            if len(answer.tokens) == 4:  # The fifth token is interrupted while its text is made.
                signal.raise_signal(signal.SIGINT)
            return super().token_bytes(token)

    session, answer = Interrupted(planned(set()), Recovery()), Answer()
    request = GenerationRequest(Prompt([1, 2, 3]), GREEDY, 60)
    write_answer(session, request, answer)  # type: ignore[arg-type]
    assert answer.interrupted
    assert capsys.readouterr().out.split() == [str(token) for token in answer.tokens]
    assert len(answer.tokens) == 5
    assert answer.unread == answer.tokens[4:]
    assert session.tokens == [1, 2, 3, *answer.tokens[:4]]
