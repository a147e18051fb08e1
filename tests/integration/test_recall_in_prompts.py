"""Frozen entries are searched in whole prompts, or only at their end with `recall_prompt`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Freezing, Session
from entropykv.settings.freezing import RECALL_END, RECALL_MICRO_BATCHES
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import TokensToRead
from tests.support.frozen_sessions import check_all_is_there, session_of
from tests.support.logits import tokens_for
from tests.support.tiny_models import write_llama

N_UBATCH = 128
AT_END = 100
STEP, LARGE_STEP = RECALL_MICRO_BATCHES
MicroBatch = tuple[int, bool]
"""The tokens of a micro-batch, and whether they may recall frozen entries."""


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> list[MicroBatch]:
    """Return a list to which every micro-batch is appended that is read from now on."""
    seen: list[MicroBatch] = []
    before = HeadwiseStore.before

    def noted(self: HeadwiseStore, reading: TokensToRead) -> None:
        seen.append((reading.n_tokens, reading.recalls))
        before(self, reading)

    monkeypatch.setattr(HeadwiseStore, "before", noted)
    return seen


def session_for(path: Path, **options: Any) -> Session:
    defaults = {"n_ctx": 2200, "n_ubatch": N_UBATCH, "freeze": Freezing(recall_prompt=AT_END)}
    return session_of(path, **{**defaults, **options})


def recalled_after_each(session: Session, tokens: list[int]) -> Iterator[int]:
    for _ in session.reader.read(tokens, all_logits=False):
        yield session.stats().entries_recalled


@pytest.mark.parametrize("n_tokens", [2, 16, 17, 99, 100, 101, 115, 116, 117, 500, 1047])
def test_only_the_end_is_read_in_small_steps(
    tiny_llama: Path, micro_batches: list[MicroBatch], n_tokens: int
) -> None:
    with session_for(tiny_llama) as session:
        session.decode(tokens_for(n_tokens))
    before = [n for n, recalls in micro_batches if not recalls]
    end = [n for n, recalls in micro_batches if recalls]
    assert micro_batches == [*((n, False) for n in before), *((n, True) for n in end)]
    assert sum(before) + sum(end) == n_tokens
    assert all(n == N_UBATCH for n in before[:-1])
    assert all(n == STEP for n in end[:-1])
    # A remainder before the end of the prompt gets no step of its own.
    assert min(n_tokens, AT_END) <= sum(end) < AT_END + STEP


@pytest.mark.parametrize(("n_ubatch", "n_steps"), [(128, 5), (16, 37), (10, 60)])
def test_a_long_prompt_recalls_at_its_end_alone(
    tiny_llama: Path, n_ubatch: int, n_steps: int
) -> None:
    with session_for(tiny_llama, n_ubatch=n_ubatch) as session:
        recalled = list(recalled_after_each(session, tokens_for(700)))
        assert session.stats().frozen_entries > 0
        assert recalled[:n_steps] == [0] * n_steps
        assert recalled[-1] > 0
        check_all_is_there(session)


@pytest.mark.parametrize("n_tokens", [2, 255, 256, 271, 272, 273, 900])
def test_the_whole_prompt_recalls_unless_told_otherwise(
    tiny_llama: Path, micro_batches: list[MicroBatch], n_tokens: int
) -> None:
    with session_for(tiny_llama, freeze="ram") as session:
        session.decode(tokens_for(n_tokens))
    assert all(recalls for _, recalls in micro_batches)
    before = (n_tokens - RECALL_END) // STEP * STEP if n_tokens > RECALL_END else 0
    sizes = [LARGE_STEP] * (before // LARGE_STEP)
    if before % LARGE_STEP:
        sizes.append(before % LARGE_STEP)
    end = n_tokens - before
    sizes += [STEP] * (end // STEP)
    if end % STEP:
        sizes.append(end % STEP)
    assert [n for n, _ in micro_batches] == sizes


@pytest.mark.parametrize(
    ("options", "all_logits", "size"),
    [
        # All logits are requested, so that every prediction may need frozen entries.
        ({}, True, STEP),
        # This policy ends with micro-batches in any case.
        ({"policy": "rolling-freeze"}, False, STEP),
        ({"freeze": Freezing(recall_prompt=10_000)}, False, STEP),
        ({"freeze": Freezing(recall_interval=0)}, False, N_UBATCH),
        ({"freeze": None}, False, N_UBATCH),
    ],
)
def test_what_is_read_in_equal_steps(
    tiny_llama: Path,
    micro_batches: list[MicroBatch],
    options: dict[str, Any],
    all_logits: bool,
    size: int,
) -> None:
    with session_for(tiny_llama, **options) as session:
        session.decode(tokens_for(600), all_logits=all_logits)
    assert {n for n, _ in micro_batches[:-1]} == {size}
    assert all(recalls for _, recalls in micro_batches)


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "step"),
    [(2, 2, 64), (6, 2, 64), (8, 2, 48), (8, 1, 24), (16, 1, 16), (32, 1, 16)],
)
def test_a_step_is_small_enough_for_its_queries(
    tmp_path: Path, micro_batches: list[MicroBatch], n_head: int, n_head_kv: int, step: int
) -> None:
    """The 128 queries that a KV head considers are two thirds or more of those of a step, unless a
    step would have fewer than 16 tokens.
    """
    write_llama(tmp_path / "m.gguf", n_head=n_head, n_head_kv=n_head_kv)
    with session_for(tmp_path / "m.gguf", n_ctx=512, freeze="ram") as session:
        session.decode(tokens_for(400))
    assert micro_batches[0] == (step, True)


def test_a_longer_text_departs_where_it_would_be_cut(tiny_llama: Path) -> None:
    """A longer text is cut at a whole micro-batch, not within the small steps at a prompt's end."""
    tokens = tokens_for(600)
    with session_for(tiny_llama, kv_budget=1.0) as session:
        session.decode(tokens)
        parts = session._slot.text.parts
        # 384 tokens are three whole micro-batches; of the 216 that follow, the last 104 are the
        # end.
        departures = [parts.begin_before(n) for n in (127, 128, 384, 385, 450, 599, 600)]
        assert departures == [0, 128, 384, 384, 384, 384, 384]
        first = session.logits
        session.text.truncate(384)
        session.decode(tokens[384:])
        np.testing.assert_array_equal(session.logits, first)
