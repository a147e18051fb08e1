"""The same request gives the same answer, whatever was asked before it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import EntropyLlama, attach
from entropykv.session.sequence import ReadParts
from tests.support.llamas import QUIET, STORES
from tests.support.logits import tokens_for

PROMPTS = [
    tokens_for(90),
    tokens_for(90)[:40],  # The beginning of the prompt above.
    [*tokens_for(90)[:33], *tokens_for(60, seed=1)],
    # With 65 tokens, the last micro-batch has one token.
    [*tokens_for(90)[:32], *tokens_for(33, seed=2)],
    tokens_for(150, seed=3),
    tokens_for(20, seed=4),
]


def tokens_of(llm: EntropyLlama, number: int) -> list[int]:
    """Return eight tokens after a prompt: greedy, or sampled with a seed if the number is odd."""
    options: dict[str, Any] = {"temp": 1.0} if number % 2 else {"temp": 0.0}
    llm.set_seed(number)
    stream = llm.generate(PROMPTS[number], **options)
    return [next(stream) for _ in range(8)]


def logits_of(llm: EntropyLlama, number: int) -> np.ndarray:
    """Return the logits after a prompt, and generate two tokens."""
    stream = llm.generate(PROMPTS[number], temp=0.0)
    next(stream)
    logits = llm._session.logits
    assert logits is not None
    next(stream)
    return logits


@pytest.mark.parametrize("budget", [1.0, 0.2])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("store", STORES)
def test_answers_repeat(tiny_llama: Path, store: str, kv_type: str, budget: float) -> None:
    """Logits are equal to the bit when prompts come again; sampled tokens would hide most
    differences.

    The predictor is fixed, because answers may differ while one is being fitted.
    """
    llm = EntropyLlama(
        str(tiny_llama),
        n_ctx=256,
        n_ubatch=32,
        kv_budget=budget,
        store=store,
        kv_type=kv_type,
        **QUIET,
    )
    chance = random.Random(f"{store} {kv_type} {budget}")
    order = [number for number in range(len(PROMPTS)) for _ in range(3)]
    chance.shuffle(order)
    answers: dict[int, list[int]] = {}
    logits: dict[int, np.ndarray] = {}
    fit = llm._session.cache.predictor_fit
    for seed in range(20 if budget < 1.0 and fit is not None else 0):
        llm._session.reset()
        llm._session.decode(tokens_for(240, seed=seed))
    assert fit is None or budget == 1.0 or fit.predictor is not None
    for number in order:
        answer = tokens_of(llm, number)
        assert answers.setdefault(number, answer) == answer
        found = logits_of(llm, number)
        assert np.array_equal(logits.setdefault(number, found), found)
    assert len({tuple(answer) for answer in answers.values()}) > 1
    llm.close()


def test_a_repeated_prompt_is_not_read_again(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, n_ubatch=32, **QUIET)
    tokens_of(llm, 0)
    before = llm.kv_stats().prompt_tokens
    tokens_of(llm, 0)
    assert llm.kv_stats().prompt_tokens == before
    tokens_of(llm, 3)  # This prompt differs after 32 tokens, which is where a micro-batch ends.
    assert llm.kv_stats().prompt_tokens - before == len(PROMPTS[3]) - 32
    llm.close()


def test_who_does_not_need_it_reads_less(tiny_llama: Path) -> None:
    """In a budget that evicts, a common beginning is read again only if answers must repeat."""
    read = {}
    for repeatable in (True, False):
        llm = EntropyLlama(
            str(tiny_llama), n_ctx=256, kv_budget=0.5, repeatable=repeatable, **QUIET
        )
        tokens_of(llm, 0)
        before = llm.kv_stats().prompt_tokens
        tokens_of(llm, 2)
        read[repeatable] = llm.kv_stats().prompt_tokens - before
        llm.close()
    assert read == {True: len(PROMPTS[2]), False: len(PROMPTS[2]) - 33}


def test_max_tokens_tells_that_nothing_will_be_evicted(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=512, kv_budget=0.9, n_ubatch=32, **QUIET)
    ask: dict[str, Any] = {"temperature": 0.0}
    first = llm.create_completion(PROMPTS[0], max_tokens=5, **ask)
    before = llm.kv_stats().prompt_tokens
    assert llm.create_completion(PROMPTS[0], max_tokens=5, **ask)["choices"] == first["choices"]
    assert llm.kv_stats().prompt_tokens == before
    llm.create_completion(PROMPTS[0], max_tokens=None, **ask)
    assert llm.kv_stats().prompt_tokens == before + len(PROMPTS[0])
    llm.close()


def test_attached_models_repeat_their_answers(tiny_llama: Path) -> None:
    import llama_cpp  # noqa: PLC0415

    llm = attach(llama_cpp.Llama(str(tiny_llama), n_ctx=256, **QUIET), kv_type="q8_0")
    assert tokens_of(llm, 0) == tokens_of(llm, 0)
    llm.close()


def test_parts_tell_where_a_text_was_cut() -> None:
    parts = ReadParts(32)
    last = np.zeros(3, np.float32)
    parts.note(0, 32, None)
    parts.note(32, 10, last)
    for position in range(42, 45):
        parts.note(position, 1, None)
    assert [parts.begin_before(p) for p in (0, 5, 32, 33, 41, 42, 43, 45)] == [
        0,
        0,
        32,
        32,
        32,
        32,
        43,
        45,
    ]
    assert parts.logits_at(42) is last
    assert parts.logits_at(41) is None
    parts.truncate(42)
    assert parts.logits_at(42) is last
    parts.truncate(40)
    assert parts.logits_at(42) is None
    assert parts.begin_before(40) == 32
    parts.truncate(32)
    assert parts.begin_before(32) == 32
