"""Choose random settings of a session, some of which are impossible."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from entropykv import EntropyProfile, Freezing
from entropykv.policy.policy import AUTO, MEASURES, MODIFIERS, POLICIES
from entropykv.settings.freezing import Recovery, Rung
from tests.fuzz.models import FuzzModel

LONGEST = 2**20
"""Tokens of the largest context; a session's memory must not grow with it."""
_MICRO_BATCHES = (1, 2, 3, 7, 16, 31, 32, 33, 64, 128, 512)


def random_options(chance: random.Random, model: FuzzModel, folder: Path) -> dict[str, Any]:
    """Return arguments of Session, without the model; it refuses some combinations."""
    n_ctx = _context(chance)
    freeze = random_freezing(chance, folder)
    return {
        "n_ctx": n_ctx,
        "kv_budget": random_budget(chance, n_ctx),
        "policy": _policy(chance, freeze is not None),
        "kv_type": chance.choice(("auto", "f16", "f16", "q8_0", "q8_0/iq4_nl")),
        "store": "headwise" if freeze else chance.choice(("headwise", "headwise", "auto", "flat")),
        "entropy_config": _profile(chance, model),
        "n_ubatch": chance.choice(_MICRO_BATCHES),
        "n_threads": chance.choice((1, 2, 2, 3)),
        "n_threads_batch": chance.choice((0, 0, 1, 2, 3)),
        "n_sinks": chance.choice((0, 1, 4, 4, 4, 7, 30)),
        "recent_window": chance.choice((None, None, 1, 5, 16, 64)),
        "freeze": freeze,
        "recovery": _recovery(chance) if freeze else None,
        **random_drafts(chance, model.path),
    }


def random_drafts(chance: random.Random, draft_model: Path) -> dict[str, Any]:
    """Return options of drafting: none, from the text itself, or by a draft model."""
    kind = chance.choice(("none", "ngram", "ngram", "draft"))
    drafts: dict[str, Any] = {"spec_type": kind, "draft_max": chance.choice((1, 3, 15, 63))}
    if kind == "draft":
        drafts["spec_draft_model"] = draft_model
        drafts["draft_kv_budget"] = chance.choice((40, 300))
        drafts["draft_p_min"] = chance.choice((0.0, 0.0, 0.75))
    return drafts


def long_options(chance: random.Random, folder: Path) -> dict[str, Any]:
    """Return options: heads of thousands of entries, above any block, page, cap or table size."""
    freeze = random_freezing(chance, folder, share=0.8)
    return {
        "n_ctx": chance.choice((12_000, 30_000, LONGEST)),
        "kv_budget": chance.randrange(4_500, 9_000),
        "policy": chance.choice(
            ("uniform", "uniform:attention", "streaming", "auto", "rolling-freeze")
        ),
        "kv_type": chance.choice(("f16", "q8_0", "q8_0/iq4_nl")),
        "n_ubatch": chance.choice((128, 512)),
        "n_threads": chance.choice((1, 2, 3)),
        "recent_window": chance.choice((None, 8, 64, 512)),
        "freeze": freeze,
    }


def random_budget(chance: random.Random, n_ctx: int) -> float | int | str:
    """Return a share of the context, a number of tokens, or bytes."""
    kind = chance.random()
    if kind < 0.15:
        return 1.0 if n_ctx < LONGEST else 0.01
    if kind < 0.35 and n_ctx < LONGEST:
        return round(chance.uniform(0.05, 0.9), 3)
    if kind < 0.85:
        return chance.randrange(2, min(max(n_ctx, 3), 600))
    return f"{chance.choice((8, 24, 64, 200, 999, 4096))}KiB"


def random_freezing(chance: random.Random, folder: Path, share: float = 0.45) -> Freezing | None:
    """Return settings of freezing; None with a probability of 1 - `share`."""
    if chance.random() > share:
        return None
    return Freezing(
        where=chance.choice(("ram", "ram", f"disk:{folder}")),
        limit=chance.choice((None, None, None, 30_000, 120_000, "1MiB")),
        kv_type=chance.choice(("auto", "auto", "q8_0", "q4_0", "f16")),
        recall_interval=chance.choice((0, 1, 1, 1, 2, 5)),
        recall_prompt=chance.choice((None, None, None, 1, 20, 100, 256, 10**6)),
        window=chance.choice((32, 32, 1, 7, 200)),
        threshold=chance.choice((None, None, 0.0, 0.3, 2.0, 50.0)),
        rate=chance.choice((2.0, 2.0, 0.5, 0.1)),
        history=chance.choice((0, 0, 1, 20)),
    )


def _context(chance: random.Random) -> int:
    kind = chance.random()
    if kind < 0.1:
        return LONGEST
    if kind < 0.25:
        return chance.randrange(1, 70)
    return chance.randrange(70, 1500 if kind < 0.5 else 400)


def _policy(chance: random.Random, freezes: bool) -> str:
    names = [AUTO, *POLICIES, "uniform", "adaptive", *(["rolling-freeze"] * 2 * freezes)]
    name = chance.choice(names)
    if name == AUTO or chance.random() < 0.5:
        return name
    modifiers = [modifier for modifier in MODIFIERS if chance.random() < 0.3]
    return f"{name}:" + "+".join((chance.choice(list(MEASURES)), *modifiers))


def _profile(chance: random.Random, model: FuzzModel) -> EntropyProfile | None:
    """Return a profile with random entropies; None by chance, or if heads are not known."""
    if model.heads is None or chance.random() < 0.5:
        return None
    n_layer, n_head, n_head_kv = model.heads
    entropies = [[chance.uniform(0.0, 8.0) for _ in range(n_head)] for _ in range(n_layer)]
    return EntropyProfile(n_layer, n_head, n_head_kv, 512, np.array(entropies))


def _recovery(chance: random.Random) -> Recovery | None:
    """Return None or a ladder that is climbed often, so that a few dozen tokens are enough."""
    if chance.random() < 0.6:
        return None
    return Recovery(
        deviations=chance.choice((0.05, 0.5, 3.0)),
        warm_up=chance.choice((2, 5)),
        refractory=chance.choice((0, 2)),
        calm=chance.choice((2, 32)),
        window=chance.choice((1, 8, 64)),
        rewalk=chance.choice((0, 1, 4, 8)),
        highest=chance.choice((Rung.SOFT, Rung.FULL, Rung.REWALK)),
    )
