"""Run scenarios that random runs would hardly reach; each of them once revealed a defect.

Each returns a line that says what was done, and raises if a promise is broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from entropykv import Freezing, Session
from entropykv.settings.freezing import Rung
from tests.fuzz.models import FuzzModel, llama_model
from tests.fuzz.operations import Operation
from tests.fuzz.promises import require
from tests.fuzz.session_runs import Run
from tests.support.model_reference import ModelReference

ONE_LAYER = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "weight_type": "F32"}
TOPICS = range(3, 320, 5)
SLOW = slice(6, None)
"""Values of a head that RoPE hardly rotates over a whole text, with the base of two_topics()."""


def two_topics(folder: Path) -> str:
    """Ask a head full of one topic for another one, of which more is frozen than a step recalls."""
    options = {
        "n_ctx": 2**20,
        "kv_budget": 2_600,
        "policy": "uniform",
        "kv_type": "f16",
        "n_threads": 2,
        "recent_window": 64,
        "freeze": Freezing(recall_interval=10**6),
    }
    return _recall_a_topic(folder, options, 2_700, n_queries=6)


def two_topics_in_few_bits(folder: Path) -> str:
    """Do what two_topics() does, but frozen entries have fewer bits than active ones, and every
    step recalls.
    """
    options = {
        "n_ctx": 20_000,
        "kv_budget": 2_600,
        "policy": "uniform:attention",
        "kv_type": "q8_0",
        "n_threads": 2,
        "recent_window": 16,
        "freeze": Freezing(kv_type="q4_0"),
    }
    return _recall_a_topic(folder, options, 2_700, n_queries=6)


def _recall_a_topic(folder: Path, options: dict[str, Any], length: int, n_queries: int) -> str:
    """Read two topics of one token each, then ask for the first one; most of it must come back."""
    model = llama_model(folder, **ONE_LAYER, n_ctx_train=2**20, rope_freq_base=1e12)
    with Session(model.path, **options) as session:
        run = Run(random.Random(1), model, options, session)
        topics, queries = _told_apart(model, n_queries)
        for token in topics:
            run.do(Operation("decode", ((token,) * length, False)))
        for token in queries:
            run.do(Operation("thaw", (Rung.SOFT, 0)))
            run.do(Operation("decode", ((token,), False)))
        n_recalled = session.stats().entries_recalled
        run.finish()
        require(n_recalled > 2_100, f"a topic comes back, and not {n_recalled} entries of it")
        return f"{n_recalled} entries recalled"


def _told_apart(model: FuzzModel, n_queries: int) -> tuple[tuple[int, int], list[int]]:
    """Return two tokens, and the query tokens from which the logits of their keys differ most.

    The query tokens attend mostly to the first of the two.
    """
    reference = ModelReference(model.path, "silu")
    x = reference.norm(reference.weights["token_embd"], "blk.0.attn_norm")
    keys = reference.heads(x, 0, "attn_k", reference.n_head_kv)[0, list(TOPICS), SLOW]
    queries = reference.heads(x, 0, "attn_q", reference.n_head)[..., SLOW]
    logits = queries @ keys.T  # The shape is [query head][query token][topic].
    rather = (logits[..., :, None] - logits[..., None, :]).max(axis=0)
    last = np.sort(rather, axis=0)[-n_queries]
    first, second = np.unravel_index(last.argmax(), last.shape)
    best = np.argsort(rather[:, first, second])[-n_queries:]
    return (TOPICS[int(first)], TOPICS[int(second)]), best.tolist()


def the_largest_context(folder: Path) -> str:
    """Use a million tokens of context with a small budget and frozen entries."""
    model = llama_model(folder, **ONE_LAYER, n_ctx_train=2048)
    options = {"n_ctx": 2**20, "kv_budget": 300, "freeze": "ram", "n_threads": 3}
    run = _run_of(random.Random(4), model, options)
    with run.session:
        run.operations(12)
        run.finish()
        return f"{run.session.position} tokens"


def ten_thousand_entries(folder: Path) -> str:
    """Fill heads of 10,000 entries, with measures of a head and of a layer."""
    model = llama_model(folder, **ONE_LAYER, n_ctx_train=2**20)
    chance = random.Random(5)
    for policy in ("uniform:mass+values", "layer"):
        options = {"n_ctx": 16_000, "kv_budget": 10_500, "policy": policy, "n_threads": 2}
        with Session(model.path, **options) as session:
            run = Run(chance, model, options, session)
            run.do(Operation("decode", (tuple(chance.choices(range(3, 300), k=11_500)), False)))
            run.do(Operation("resize", (9_000,)))
            run.do(Operation("reload", ()))
            run.do(Operation("resize", (0.1,)))
            run.do(Operation("decode", ((5,) * 600, False)))
    return "2 policies"


def _run_of(chance: random.Random, model: FuzzModel, options: dict[str, Any]) -> Run:
    session = Session(model.path, **options)
    return Run(chance, model, options, session)


SCENARIOS: dict[str, Callable[[Path], str]] = {
    scenario.__name__: scenario
    for scenario in (two_topics, two_topics_in_few_bits, the_largest_context, ten_thousand_entries)
}
