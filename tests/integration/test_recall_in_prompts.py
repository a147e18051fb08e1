"""The end of a prompt recalls frozen entries; what comes before is read without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Freezing, Session
from entropykv.settings.freezing import RECALL_MICRO_BATCH
from entropykv.store.headwise import HeadwiseStore
from tests.support.frozen_sessions import check_all_is_there, session_of
from tests.support.logits import tokens_for

N_UBATCH = 64
AT_END = Freezing().recall_prompt
Micro = tuple[int, bool]
"""The tokens of a micro-batch, and whether they may recall frozen entries."""


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> list[Micro]:
    """List the micro-batches that are read from now on."""
    seen: list[Micro] = []
    before = HeadwiseStore.before

    def noted(self: HeadwiseStore, n_tokens: int, *positional: Any, **named: Any) -> None:
        seen.append((n_tokens, named["recalls"]))
        before(self, n_tokens, *positional, **named)

    monkeypatch.setattr(HeadwiseStore, "before", noted)
    return seen


def session_for(path: Path, n_tokens: int, **options: Any) -> Session:
    return session_of(path, n_ctx=max(512, 2 * n_tokens), n_ubatch=N_UBATCH, **options)


def recalled_after_each(session: Session, tokens: list[int]) -> Iterator[int]:
    for _ in session.decode_micro_batches(tokens, all_logits=False):
        yield session.stats().entries_recalled


@pytest.mark.parametrize("n_tokens", [2, 16, 17, 255, 256, 257, 272, 500, 1047])
def test_only_the_end_is_read_in_small_steps(
    tiny_llama: Path, micro_batches: list[Micro], n_tokens: int
) -> None:
    with session_for(tiny_llama, n_tokens) as session:
        session.decode(tokens_for(n_tokens))
    before = [n for n, recalls in micro_batches if not recalls]
    end = [n for n, recalls in micro_batches if recalls]
    assert micro_batches == [*((n, False) for n in before), *((n, True) for n in end)]
    assert sum(before) + sum(end) == n_tokens
    assert all(n == N_UBATCH for n in before[:-1])
    assert all(n == RECALL_MICRO_BATCH for n in end[:-1])
    # The end is not cut into a small rest and small steps.
    assert min(n_tokens, AT_END) <= sum(end) < AT_END + RECALL_MICRO_BATCH


def test_a_long_prompt_recalls_at_its_end_alone(tiny_llama: Path) -> None:
    n_tokens = 700
    with session_for(tiny_llama, n_tokens) as session:
        recalled = list(recalled_after_each(session, tokens_for(n_tokens)))
        assert session.stats().frozen_entries > 0
        n_steps = 7  # of 64 tokens, and one of 48
        assert recalled[:n_steps] == [0] * n_steps
        assert recalled[-1] > 0
        check_all_is_there(session)


@pytest.mark.parametrize(
    ("options", "all_logits", "size"),
    [
        ({}, True, RECALL_MICRO_BATCH),  # every prediction may need what was frozen
        ({"policy": "rolling-freeze"}, False, RECALL_MICRO_BATCH),  # its steps are micro-batches
        ({"freeze": Freezing(recall_interval=0)}, False, N_UBATCH),
        ({"freeze": None}, False, N_UBATCH),
    ],
)
def test_what_is_read_in_equal_steps(
    tiny_llama: Path,
    micro_batches: list[Micro],
    options: dict[str, Any],
    all_logits: bool,
    size: int,
) -> None:
    n_tokens = 600
    with session_for(tiny_llama, n_tokens, **options) as session:
        session.decode(tokens_for(n_tokens), all_logits=all_logits)
    assert {n for n, _ in micro_batches[:-1]} == {size}
    assert all(recalls for _, recalls in micro_batches)


def test_a_longer_text_departs_where_it_would_be_cut(tiny_llama: Path) -> None:
    """Within the small steps at the end, a longer text has no cut."""
    tokens = tokens_for(600)
    with session_for(tiny_llama, 600, kv_budget=1.0) as session:
        session.decode(tokens)
        parts = session._slot.text.parts
        # 256 tokens at the end, and what was left over before them, are one part.
        last = (600 - AT_END) // N_UBATCH * N_UBATCH
        assert [parts.begin_before(p) for p in (63, 64, last, last + 1, 500, 600)] == [
            0,
            64,
            last,
            last,
            last,
            last,
        ]
        first = session.logits
        session.truncate(last)
        session.decode(tokens[last:])
        np.testing.assert_array_equal(session.logits, first)
