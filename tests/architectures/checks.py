"""Check how each store serves a tiny model, against stock llama.cpp."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from entropykv import Session, UnsupportedModelError
from entropykv.evaluation.stock import StockSession
from entropykv.model.architectures import ArchitectureCheck, Served
from tests.architectures.description import Architecture
from tests.architectures.writer import write_architecture
from tests.support.architecture_reading import Logits, decided, greedy, next_logits, read
from tests.support.logits import relative_error, tokens_for

N_CTX = 256
PROMPT_TOKENS = 30
GREEDY_TOKENS = 64
TOKENS = tokens_for(150)
LONG = tokens_for(220)  # Longer than a micro-batch and than half the context.
MICRO_BATCHES = (7, 64)


class CheckError(Exception):
    """Raised for a store that serves a model incorrectly; says how."""


@dataclass(frozen=True)
class Expected:
    """Hold stock llama.cpp's logits for TOKENS, and what it writes after PROMPT_TOKENS of them."""

    micro_batches: Logits
    one_by_one: Logits
    text: list[int]
    rows: Logits
    """The logits from which each token of the text was chosen."""

    @classmethod
    def of(cls, path: Path, n_ubatch: int, rounding: float, *, flash: bool) -> Expected:
        session = StockSession(path, n_ctx=N_CTX, n_threads=1, n_ubatch=n_ubatch, flash=flash)
        micro_batches = read(session, TOKENS, len(TOKENS))
        session.reset()
        one_by_one = read(session, TOKENS, 1)
        session.reset()
        text, rows = greedy(session, TOKENS[:PROMPT_TOKENS], GREEDY_TOKENS)
        session.close()
        if not (np.isfinite(micro_batches).all() and micro_batches.std() > 0.5):
            raise CheckError("stock llama.cpp's logits make no sense")
        if not relative_error(one_by_one, micro_batches) < 4 * rounding:
            raise CheckError("stock llama.cpp's logits hang on how many tokens are read at once")
        return cls(micro_batches, one_by_one, text, rows)


@dataclass
class Outcome:
    """Hold the results of one store's checks."""

    served: Served | None = None
    note: str | None = None
    failure: str | None = None

    @classmethod
    def of(cls, path: Path, store: str, rounding: float) -> Outcome:
        """Run the checks; every failure and every refusal is recorded in the result."""
        outcome = cls()
        try:
            served = serve(path, store, rounding)
            outcome.note = evict(path, store)
            outcome.served = replace(served, half_budget=outcome.note is None)
        except UnsupportedModelError as refusal:
            outcome.note = sentence(refusal, path)
        except Exception as error:
            outcome.failure = f"{path.stem}, {store} store: {type(error).__name__}: {error}"
        return outcome


def check(model: Architecture) -> ArchitectureCheck:
    """Check a model in both stores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model.name}.gguf"
        write_architecture(path, model)
        headwise, flat = (Outcome.of(path, store, model.rounding) for store in ("headwise", "flat"))
    notes = [outcome.note for outcome in (headwise, flat) if outcome.note]
    return ArchitectureCheck(
        architecture=model.architecture,
        store="headwise" if headwise.served else "flat" if flat.served else "none",
        models=(model.name,),
        limit=model.rounding,
        headwise=headwise.served,
        flat=flat.served,
        notes=tuple(dict.fromkeys(notes)),
        failures=tuple(outcome.failure for outcome in (headwise, flat) if outcome.failure),
    )


def serve(path: Path, store: str, rounding: float) -> Served:
    """Compare a store that has a full budget with stock llama.cpp, which reads in the same way.

    Raises UnsupportedModelError if the store refuses the model, CheckError if it differs.
    """
    found = [_compare(path, store, n_ubatch, rounding) for n_ubatch in MICRO_BATCHES]
    served = worst(*found)
    if not max(served.one_by_one, served.micro_batches) < rounding:
        raise CheckError(f"{served} differs from stock by {rounding} or more")
    return served


def _compare(path: Path, store: str, n_ubatch: int, rounding: float) -> Served:
    with Session(
        path, n_ctx=N_CTX, store=store, kv_type="f16", n_ubatch=n_ubatch, n_threads=1
    ) as session:
        expected = Expected.of(path, n_ubatch, rounding, flash=store == "flat")
        micro_batches = read(session, TOKENS, len(TOKENS))
        session.reset()
        one_by_one = read(session, TOKENS, 1)
        session.reset()
        same = chosen(session, expected.text) == expected.text
    if not same[decided(expected.rows, rounding)].all():
        raise CheckError("other tokens are chosen than by stock")
    return Served(
        one_by_one=rounded(relative_error(one_by_one, expected.one_by_one)),
        micro_batches=rounded(relative_error(micro_batches, expected.micro_batches)),
        greedy_equal=int(same.sum()),
        half_budget=False,
    )


def worst(one: Served, other: Served) -> Served:
    """Return the worse of each figure."""
    return Served(
        one_by_one=max(one.one_by_one, other.one_by_one),
        micro_batches=max(one.micro_batches, other.micro_batches),
        greedy_equal=min(one.greedy_equal, other.greedy_equal),
        half_budget=one.half_budget and other.half_budget,
    )


def chosen(session: Session, text: list[int]) -> npt.NDArray[np.int64]:
    """Return the greedy choices after the prompt and after each token of a text but the last."""
    rows = [next_logits(session, TOKENS[:PROMPT_TOKENS])]
    rows += [next_logits(session, [token]) for token in text[:-1]]
    return np.stack(rows).argmax(axis=1)


def evict(path: Path, store: str) -> str | None:
    """Read more than a budget of half the context holds; returns the message of a store that
    refuses, or else None.
    """
    try:
        stay_inside_half(path, store)
    except UnsupportedModelError as refusal:
        return f"in less than the whole context: {sentence(refusal, path)}"
    return None


def stay_inside_half(path: Path, store: str) -> None:
    """Raise CheckError if a store exceeds a budget of half the context, or gives logits that are
    not finite.
    """
    with Session(
        path, n_ctx=N_CTX, kv_budget=0.5, store=store, kv_type="f16", n_ubatch=32, n_threads=1
    ) as session:
        parts = read(session, LONG[:-20], N_CTX), read(session, LONG[-20:], 1)
        stats = session.stats()
    if not all(np.isfinite(logits).all() for logits in parts):
        raise CheckError("logits of half the budget are not finite")
    if stats.kv_bytes_peak > stats.kv_bytes_budget:
        raise CheckError(f"{stats.kv_bytes_peak} bytes of a budget of {stats.kv_bytes_budget}")


def sentence(refusal: UnsupportedModelError, path: Path) -> str:
    """Return the reason of a refusal, without the name of the model."""
    return str(refusal).removeprefix(f"{path.stem}: ")


def rounded(error: float) -> float:
    """Return an error rounded to two digits; further digits depend on the processor."""
    return float(f"{error:.1e}")
