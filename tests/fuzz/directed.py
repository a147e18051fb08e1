"""Run scenarios that random runs would hardly reach; each of them once revealed a defect.

Each returns a line that says what was done, and raises if a promise is broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from entropykv import Freezing, Session, _core
from entropykv.settings.recovery import Rung
from tests.fuzz.models import WIDE_GROUPS, FuzzModel, architecture_model, llama_model
from tests.fuzz.operations import Operation
from tests.fuzz.promises import require
from tests.fuzz.session_runs import Run
from tests.support.model_reference import ModelReference

ONE_LAYER = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "head_dim": 16, "weight_type": "F32"}
TOPICS = range(3, 320, 5)
SLOW = slice(6, None)
"""Values of a head that RoPE hardly rotates over a whole text, with the base of two_topics()."""
ENTRIES = 256
"""Entries of the stores that are made without a model."""


def two_topics(folder: Path) -> str:
    """Ask for another topic of a head full of one topic; it froze more of the other than a step
    recalls.
    """
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
    """Do the same with frozen entries of fewer bits than active ones, and with recall in every
    step.
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
    """Read topics of one token each: those that a query token distinguishes best."""
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
    """Return two tokens whose keys get the most different logits from some query tokens, and these.

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


def wide_groups_beside_narrow_ones(folder: Path) -> str:
    """Check that any number of threads gives the same bits, whatever the layers' groups are."""
    for description in WIDE_GROUPS:
        model = architecture_model(description, folder)
        chance = random.Random(3)
        options = {"n_ctx": 600, "kv_budget": 100, "policy": "uniform", "n_threads": 1}
        rows = []
        for n_threads in (1, 2, 3, 4):
            with Session(model.path, **{**options, "n_threads": n_threads}) as session:
                for n_tokens in (150, 70, 1, 33):
                    tokens = random.Random(n_tokens).choices(range(3, 300), k=n_tokens)
                    rows.append(session.decode(tokens, all_logits=True))
        per_run = len(rows) // 4
        first = [row.tobytes() for row in rows[:per_run]]
        for start in range(0, len(rows), per_run):
            same = [row.tobytes() for row in rows[start : start + per_run]] == first
            require(same, f"{description.name}: {start // per_run + 1} threads, the same logits")
        _run_of(chance, model, options).finish()
    return f"{len(WIDE_GROUPS)} models"


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


def one_bad_row(_: Path) -> str:
    """Read queries that are not numbers: they are ignored, and the entries can be saved
    and loaded.
    """
    for policy in ("mass", "attention", "products"):
        store, shape = _bare_store(getattr(_core.ScoreKind, policy))
        chance = np.random.default_rng(6)
        for step in range(8):
            q, k, v = _rows(chance, shape, 16)
            q[3, 1] = np.nan if step == 4 else q[3, 1]
            store.attend(0, q, k, v, scale=0.25, position=16 * step)
        for head in range(shape.n_head_kv):
            importance = store.importance(0, head)
            require(np.isfinite(importance).all(), f"importance by {policy} is finite")
            state = bytearray(store.save_head(0, head))
            problem = store.state_problem(0, store.count(0, head), state, 128)
            require(not problem, f"what was saved can be loaded, by {policy}: {problem}")
    return "4 measures"


def far_positions(_: Path) -> str:
    """Check that tokens see all earlier tokens and no others, at very large positions."""
    expected = None
    for position in (0, 2**24 - 2, 2**26, 2**30 - 300):
        store, shape = _bare_store(_core.ScoreKind.mass)
        chance = np.random.default_rng(7)
        rows = []
        for step in range(5):
            q, k, v = _rows(chance, shape, 4 if step % 2 else 1)
            place = position + (5 * step + 1) // 2
            rows.append(store.attend(0, q, k, v, scale=0.25, position=place))
        result = np.concatenate(rows)
        expected = result if expected is None else expected
        require(np.allclose(result, expected, atol=1e-5), f"attention at position {position}")
    return "up to 2^30"


def arguments_of_the_extension(_: Path) -> str:
    """Pass invalid arguments to the extension, which must check them."""
    n_refused = 0
    for change in (
        {"layer": 1},
        {"layer": -1},
        {"reader": 1},
        {"reader": -1},
        {"position": -1},
        {"n_tokens": 0},
        {"n_tokens": 65},
    ):
        store, shape = _bare_store(_core.ScoreKind.mass)
        given: dict[str, Any] = {"layer": 0, "n_tokens": 4, "reader": 0, "position": 0, **change}
        q, k, v = _rows(np.random.default_rng(8), shape, given.pop("n_tokens"))
        try:
            store.attend(given.pop("layer"), q, k, v, scale=1.0, **given)
        except (ValueError, IndexError):
            n_refused += 1
        else:
            require(False, f"attend() refuses {change}")
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("begin", (0, 0, 0)),
        ("begin", (65, 0, 0)),
        ("begin", (4, -1, 0)),
        ("count", (0, 2)),
        ("budget", (5, 0)),
        ("positions", (-1, 0)),
        ("rows", (0, 7)),
        ("save_head", (3, 0)),
        ("entropies", (9,)),
        ("queries", (9,)),
        ("row_entropies", (9,)),
        ("set_budgets", ([10], 100, 2, 4)),
        ("set_budgets", ([10, -5], 100, 2, 4)),
    ]
    for name, arguments in calls:
        store, _shape = _bare_store(_core.ScoreKind.mass)
        try:
            getattr(store, name)(*arguments)
        except (ValueError, IndexError):
            n_refused += 1
        else:
            require(False, f"{name}{arguments} is refused")
    return f"{n_refused} calls refused"


def _run_of(chance: random.Random, model: FuzzModel, options: dict[str, Any]) -> Run:
    session = Session(model.path, **options)
    return Run(chance, model, options, session)


def _bare_store(kind: _core.ScoreKind) -> tuple[_core.HeadwiseStore, _core.LayerShape]:
    shape = _core.LayerShape(4, 2, 16, 16)
    store = _core.HeadwiseStore(
        [shape],
        "f16",
        _core.ImportanceSettings(kind, decay=0.9),
        n_sinks=2,
        recent_window=4,
        max_tokens=64,
        max_entries=ENTRIES,
        n_threads=1,
        ropes=[_core.RopeParams(0)],
    )
    _, (per_page,) = _core.page_geometry([shape], "f16")
    store.set_budgets([ENTRIES] * 2, 2 * _core.pages_for(ENTRIES, per_page), 2, 4)
    return store, shape


def _rows(chance: np.random.Generator, shape: _core.LayerShape, n_tokens: int) -> list[Any]:
    heads = ((shape.n_head, shape.k_dim), (shape.n_head_kv, shape.k_dim))
    sizes = (*heads, (shape.n_head_kv, shape.v_dim))
    return [chance.standard_normal((n_tokens, *size), dtype=np.float32) for size in sizes]


SCENARIOS: dict[str, Callable[[Path], str]] = {
    scenario.__name__: scenario
    for scenario in (
        two_topics,
        two_topics_in_few_bits,
        wide_groups_beside_narrow_ones,
        the_largest_context,
        ten_thousand_entries,
        one_bad_row,
        far_positions,
        arguments_of_the_extension,
    )
}
