"""Checkpoints of a pool allow rollback after evictions, and other sessions to go on from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import EntropyLlama, Pool, Session, SettingsError
from entropykv.session import shared_pool
from entropykv.session.reuse import LEAST_SPARED, Demand
from tests.architectures import MODELS
from tests.support.llamas import QUIET
from tests.support.pools import N_CTX, PIECE, PROMPTS, Rows, Steps, assert_equal, pool_of, written
from tests.support.releases import write_known

SYSTEM = PROMPTS[4]


pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def model(pool_llama: Path) -> Path:
    return pool_llama


def text_of(prompt: Sequence[int], rows: Rows) -> list[int]:
    """Return the text of a session after written() has returned these rows."""
    return [*prompt, *(int(row.argmax()) for row in rows[:-1])]


def again(session: Session, n: int) -> Rows:
    """Return the kept logits of a prompt, and those of n tokens that are written after it."""
    assert session.logits is not None
    rows = [session.logits]
    for _ in range(n):
        rows.append(session.decode([int(rows[-1].argmax())])[-1])
    return rows


@pytest.mark.parametrize("policy", ["uniform", "adaptive", "layer"])
@pytest.mark.parametrize("tokens", [N_CTX, 96])
def test_an_answer_is_written_again_without_reading(model: Path, tokens: int, policy: str) -> None:
    with pool_of(model, n_sequences=2, kv_budget=tokens, policy=policy) as pool:
        session = pool.session()
        expected = written(session, SYSTEM, 20)
        assert (session.cache.evicted > 0) == (tokens == 96)
        steps = Steps(pool)
        for _ in range(2):
            assert session.text.return_to_checkpoint(SYSTEM)
            assert session.tokens == SYSTEM
            assert_equal(again(session, 20), expected)
        assert sum(map(sum, steps.parts)) == 2 * 20
        session.close()
        assert pool.stats().checkpoints > 0


@pytest.mark.parametrize("tokens", [N_CTX, 96])
def test_an_edited_turn_goes_on_from_the_end_of_the_answer_before(model: Path, tokens: int) -> None:
    with pool_of(model, n_sequences=2, kv_budget=tokens) as pool:
        session = pool.session()
        rows = written(session, SYSTEM, 6)
        first_turn = text_of(SYSTEM, rows)
        assert session.tokens == first_turn
        fork = session.fork()
        written(session, PROMPTS[1], 6)
        steps = Steps(pool)
        assert session.text.return_to_checkpoint([*first_turn, *PROMPTS[0]])
        assert session.position == len(first_turn)
        found = written(session, PROMPTS[0], 4)
        assert sum(map(sum, steps.parts)) == len(PROMPTS[0]) + 4
        session.reset()
        assert_equal(written(fork, PROMPTS[0], 4), found)


@pytest.mark.parametrize("name", ["gemma3", "jamba", "lfm2", "qwen3next"])
def test_windows_and_recurrent_layers_come_back_too(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    write_known(path, MODELS[name])
    with pool_of(path, n_sequences=1, kv_type="f16", kv_budget=N_CTX) as pool:
        session = pool.session()
        expected = written(session, PROMPTS[2], 8)
        assert session.text.return_to_checkpoint(PROMPTS[2])
        assert_equal(again(session, 8), expected)
        assert not session.text.return_to_checkpoint(PROMPTS[1])


def test_where_a_small_share_drops_what_a_checkpoint_needs_the_session_is_empty(
    tmp_path: Path,
) -> None:
    """A session is empty if it has asked for a checkpoint of a tight pool that comes back into a
    smaller share, in which its windows lose what they would see from an earlier position.
    """
    path = tmp_path / "windows.gguf"
    write_known(path, MODELS["gemma3"])
    given = {"n_sequences": 2, "kv_budget": 90, "kv_type": "f16", "n_ubatch": 8}
    with pool_of(path, **given, policy="recency") as pool:
        first = pool.session()
        text = PROMPTS[4][:56]
        first.decode(text)
        first.decode([77])
        asked = [*text[:-5], *PROMPTS[3]]
        second = pool.session()
        assert not second.text.return_to_checkpoint(asked)
        third = pool.session_for(asked)
        for session in (second, third):
            assert session.position == 0
            assert session.tokens == []
        assert first.tokens == [*text, 77]
        assert np.isfinite(second.decode(asked)).all()


@pytest.mark.parametrize(
    ("name", "tokens"), [*(("llama", n) for n in (64, 80, 96)), ("jamba", N_CTX)]
)
def test_within_a_prompt_they_are_kept_at_intervals(
    name: str, tokens: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a prompt, checkpoints are kept at intervals, because later ones cannot be cut to an
    earlier end if something was evicted, or layers are recurrent.
    """
    monkeypatch.setattr(shared_pool, "INTERVAL", 2 * PIECE)
    if name != "llama":
        model = tmp_path / f"{name}.gguf"
        write_known(model, MODELS[name])
    with pool_of(model, n_sequences=2, kv_type="f16", kv_budget=tokens) as pool:
        session = pool.session()
        session.decode(SYSTEM)
        assert pool.stats().checkpoints > 0
        end = 6 * PIECE  # The last checkpoint of the prompt is there.
        text = [*SYSTEM[: end + 3], 7, 8, 9]
        assert session.text.return_to_checkpoint(text)
        assert session.position == end
        found = [session.decode(text[end:])[-1]]
        session.reset()
        session.decode(SYSTEM[:end])
        assert_equal(found, [session.decode(text[end:])[-1]])


def test_who_begins_the_same_goes_on_from_it(model: Path) -> None:
    """Users with the same system prompt read it once, even after the first of them has gone."""
    questions = [[7, 8, 9, n] for n in range(20, 24)]
    with pool_of(model, n_sequences=4, kv_budget=4 * N_CTX) as pool:
        with pool.session() as first:
            expected = written(first, [*SYSTEM, *questions[0]], 5)
        steps = Steps(pool)
        sessions = [pool.session_for([*SYSTEM, *question]) for question in questions]
        assert [each.position for each in sessions] == [len(SYSTEM) + 4, *[len(SYSTEM) + 3] * 3]
        assert_equal(again(sessions[0], 5), expected)
        for session, question in zip(sessions[1:], questions[1:], strict=True):
            session.decode(question[3:])
        assert sum(map(sum, steps.parts)) == 5 + 3
        assert pool.session_for([2, *SYSTEM]).position == 0


def test_the_bytes_besides_the_pool_are_limited(model: Path) -> None:
    with pool_of(model, n_sequences=1, kv_budget=96, checkpoints="100KiB") as pool:
        steps = Steps(pool)
        outside = []
        for n in range(12):
            with pool.session() as session:
                written(session, [n + 3, *PROMPTS[n % 5]], 20)
            outside.append(pool.stats().checkpoint_bytes)
        assert 0 < max(outside) <= 100 * 1024
        assert steps.most_bytes <= pool.stats().kv_bytes_budget
        assert pool.stats().swapped_out == pool.stats().swapped_bytes == 0
    with pool_of(model, checkpoints=0) as pool:
        session = pool.session()
        written(session, SYSTEM, 2)
        assert pool.stats().checkpoints == 0
        assert not session.text.return_to_checkpoint(SYSTEM)
    for limit in ("much", -1, True, 1.5):
        with pytest.raises(SettingsError, match="limit of checkpoints"):
            pool_of(model, checkpoints=limit)


def test_frozen_conversations_have_none(model: Path) -> None:
    with pool_of(model, n_sequences=1, kv_budget=96, freeze="ram") as pool:
        session = pool.session()
        written(session, SYSTEM, 4)
        assert pool.stats().checkpoints == 0
        assert not session.text.return_to_checkpoint(SYSTEM)


def test_an_application_regenerates_without_reading(model: Path) -> None:
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": PIECE, "verbose": False}
    with closing(EntropyLlama(str(model), n_sequences=2, kv_budget=96, **options)) as llama:

        def answer(prompt: list[int]) -> tuple[list[int], int]:
            before = llama.kv_stats().prompt_tokens
            stream = llama.generate(prompt, temp=0.0)
            tokens = [next(stream) for _ in range(12)]
            stream.close()
            return tokens, llama.kv_stats().prompt_tokens - before

        first, n_read = answer(SYSTEM)
        assert n_read == len(SYSTEM)
        assert llama.kv_stats().evictions > 0
        assert answer(SYSTEM) == (first, 0)
        edited = [*SYSTEM, *first[:11], 5, 6, 7]
        other, n_read = answer(edited)
        assert n_read <= 3 + 12
        assert answer(edited) == (other, 0)
        assert answer(SYSTEM) == (first, 0)


def test_checkpoints_of_a_closed_pool_are_gone(model: Path) -> None:
    pool: Pool = pool_of(model)
    session = pool.session()
    written(session, SYSTEM, 2)
    assert pool.stats().checkpoints == 1
    core = pool.runner.shared.core  # type: ignore[union-attr]
    session.close()
    assert core is not None
    assert core.used_bytes > 0
    pool.close()
    assert core.used_bytes == 0


@pytest.mark.parametrize("n_tokens", [2 * PIECE, 2 * PIECE + 1, 1])
def test_a_prompt_whose_last_piece_is_one_token_has_a_checkpoint_at_its_end(
    model: Path, n_tokens: int
) -> None:
    """A checkpoint is kept at the end of a prompt, also if its last micro-batch is a single token,
    as in decode.
    """
    llm = EntropyLlama(str(model), n_ctx=N_CTX, n_sequences=2, n_ubatch=PIECE, **QUIET)
    prompt = SYSTEM[:n_tokens]
    ask: dict[str, Any] = {"temp": 0.0}
    first = list(itertools.islice(llm.generate(prompt, **ask), 5))
    list(itertools.islice(llm.generate([*prompt, *first, *PROMPTS[0]], **ask), 5))
    found, position = llm.pool.runner.kept_texts.nearest(prompt, None, Demand(is_cut=False))
    assert found is not None
    assert position == found.position == n_tokens
    assert found.text.logits is not None
    read = llm.kv_stats().prompt_tokens
    assert list(itertools.islice(llm.generate(prompt, **ask), 5)) == first
    assert llm.kv_stats().prompt_tokens - read == (0 if n_tokens >= LEAST_SPARED else 1)
    llm.close()


def test_the_last_prompt_is_not_read_again_whatever_its_length(model: Path) -> None:
    with Session(model, n_ctx=N_CTX, n_ubatch=PIECE) as session:
        for n_tokens in (PIECE, PIECE + 1, 2 * PIECE + 1):
            session.text.truncate(0)
            expected = session.decode(SYSTEM[:n_tokens])[-1].copy()
            session.decode([5])
            session.decode([6])
            assert session.text.return_to_prompt(n_tokens, n_tokens + 9)
            assert session.logits is not None
            np.testing.assert_array_equal(session.logits, expected)


def test_logits_of_checkpoints_count_and_stay_within_the_limit(model: Path) -> None:
    """The pool counts all memory that numpy and array use for checkpoints, within its limit."""
    with Pool(model, n_ctx=N_CTX, n_sequences=2, kv_budget="8MiB", checkpoints="16KiB") as pool:
        # The texts are short, so that their entries take little memory outside the pool.
        for first in range(3, 43):
            with pool.session() as session:
                written(session, [first, 7, 9, 11], 3)
                session.decode([5, 6])  # A second turn, whose answer gets a checkpoint, too.
        stats, kept = pool.stats(), pool.runner.kept_texts.checkpoints
        texts = [each.text for each in kept]
        arrays = {id(a): a for t in texts for a in (t.logits, t.parts._logits) if a is not None}
        held = sum(a.nbytes for a in arrays.values()) + sum(4 * len(t.tokens) for t in texts)
        assert stats.checkpoints > 0
        of_entries = sum(each.n_bytes - each.text.n_bytes for each in kept)
        assert held + of_entries <= stats.checkpoint_bytes <= 16 * 1024


def test_only_checkpoints_at_the_end_of_a_prompt_hold_logits(model: Path) -> None:
    with pool_of(model, n_sequences=2) as pool, pool.session() as session:
        rows = written(session, SYSTEM, 6)
        session.decode([5, 6])
        assert [len(each.text.tokens) for each in pool.runner.kept_texts.checkpoints] == [201, 207]
        prompt, answer = pool.runner.kept_texts.checkpoints
        assert prompt.text.logits is not None
        assert answer.text.logits is answer.text.parts._logits is None
        assert session.text.return_to_checkpoint(SYSTEM)
        assert_equal(again(session, 6), rows)
        # The same turn comes again; the logits of the prompt are still kept.
        session.decode([5, 6])
        assert session.text.return_to_checkpoint(SYSTEM)
        assert session.logits is not None
