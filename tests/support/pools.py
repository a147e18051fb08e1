"""Open pools of tiny models, record their steps, and make texts for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import Pool, Session
from entropykv.store.step import decode_parts
from tests.support.threads import in_threads

Rows = list[npt.NDArray[np.float32]]
N_CTX = 512
PIECE = 32
RANDOM = random.Random(7)
PROMPTS = [[RANDOM.randrange(3, 300) for _ in range(n)] for n in (70, 33, 128, 5, 201)]


def pool_of(model: Path, **options: Any) -> Pool:
    defaults = {"n_ctx": N_CTX, "n_ubatch": PIECE, "n_threads": 2, "kv_type": "q8_0"}
    return Pool(model, **{**defaults, **options})


def written(session: Session, prompt: Sequence[int], n: int) -> Rows:
    """Return the logits of a prompt's last token, and of each of n tokens that are written greedily
    after it.
    """
    rows = _written(session, prompt, n)
    session.rest()
    return rows


def _written(session: Session, prompt: Sequence[int], n: int) -> Rows:
    rows = [session.decode(prompt)[-1]]
    for _ in range(n):
        rows.append(session.decode([int(rows[-1].argmax())])[-1])
    return rows


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Assert that rows are equal to the bit."""
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row, other)


class Steps:
    """Record the tokens of every part of each step of a pool, and the most bytes after a step."""

    def __init__(self, pool: Pool) -> None:
        self.parts: list[list[int]] = []
        self.most_bytes = 0
        scheduler, core = pool.runner.scheduler, pool.runner.shared.core
        assert core is not None
        run = scheduler._run

        def noted(works: Any) -> None:
            run(works)
            self.parts.append([len(work.part.tokens) for work in works])
            self.most_bytes = max(self.most_bytes, core.used_bytes)
            assert core.used_bytes <= core.budget_bytes

        scheduler._run = noted


def read_in_one_step(pool: Pool, sessions: Sequence[Session], tokens: Sequence[int]) -> Rows:
    """Return the logits after one token of each conversation, all read in one step.

    The step does not depend on how fast threads are.
    """
    runner = pool.runner
    readers = [session.reader for session in sessions]
    with runner.scheduler.between_steps():
        parts = [r._part([token], 1, None) for r, token in zip(readers, tokens, strict=True)]
        decode_parts(parts, runner._batch, runner.model.name)
    rows = []
    for reader, part in zip(readers, parts, strict=True):
        result = part.result()
        assert result is not None
        rows.append(result[-1].copy())
        reader._slot.text.add(part.tokens, rows[-1], is_prompt=False, continues=False)
    return rows


def together(sessions: Sequence[Session], prompts: Sequence[list[int]], n: int) -> list[Rows]:
    """Return what written() returns, for several conversations that run at the same time.

    Each rests when all have ended: before, its share would go to those that still write.
    """
    rows = in_threads(
        [
            lambda s=session, p=prompt: _written(s, p, n)
            for session, prompt in zip(sessions, prompts, strict=True)
        ]
    )
    for session in sessions:
        session.rest()
    return rows
