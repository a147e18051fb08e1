"""Summarise the figures of a combination's items in one row."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from entropykv.evaluation.metrics import disagreement
from entropykv.evaluation.reading import Values
from entropykv.evaluation.results import Record

_READ = ("prompt_tokens", "prompt_seconds")
_WRITTEN = ("decode_tokens", "decode_seconds")


@dataclass(frozen=True)
class EvalRow:
    """Hold the figures of stock llama.cpp or of one combination over all items; None: not measured,
    or not defined for stock.

    `kl`: the mean KL divergence from the full cache, in nats per token; `kl_worst`: that of the
    worst text. `perplexity_ratio`: relative to the full cache. `top1`, `greedy_equal` and `recall`
    are shares, and `rouge...` F1, from 0 to 1. Entries and bytes are those after the prompts of the
    continuations; without any, of the next part that was measured. Speeds are tokens per second.
    """

    policy: str
    kv_type: str
    budget: str
    kept: float | None = None
    """The share of entries that are kept after the prompt."""
    kv_bytes: float | None = None
    """The bytes that the pool can never exceed."""
    kv_bytes_full: float | None = None
    kl: float | None = None
    kl_worst: float | None = None
    top1: float | None = None
    perplexity_ratio: float | None = None
    greedy_equal: float | None = None
    greedy_identical: int | None = None
    """How many texts have the same greedy continuation as the full cache, to the last token."""
    prompt_speed: float | None = None
    decode_speed: float | None = None
    disagreement: float | None = None
    """By what share the fastest text's prompt or continuation was faster than the slowest."""
    recall: float | None = None
    rouge1: float | None = None
    rouge2: float | None = None
    rouge_l: float | None = None
    texts: int = 0
    questions: int = 0
    """How many planted facts were asked for."""
    answers: int = 0
    """How many questions of the data set or of a suite were answered."""
    length: int | None = None
    """The length of a suite's prompts with their answers, in tokens."""
    question: str | None = None
    """`known` if the question is read with a suite's context, `unknown` if it is read after it."""
    scores: dict[str, float] = field(default_factory=dict)
    """For each task, the share of the references that the answers contain."""
    score: float | None = None
    """The mean of the tasks' scores."""
    score_relative: float | None = None
    """The score divided by the full cache's for the same prompts."""


def summarize(policy: str, kv_type: str, budget: str, records: Sequence[Record]) -> EvalRow:
    """Summarise the records of stock llama.cpp or of one combination in a row, mostly as means over
    the items.
    """
    texts, passkeys, dataset, suite = (
        [record.values for record in records if record.part == part]
        for part in ("continuations", "passkeys", "dataset", "ruler")
    )
    kept = texts or passkeys or dataset or suite
    scores = _by_task(suite)
    equal = _column(texts, "greedy_equal")
    divergences = _column(texts, "kl")
    right = [right for values in passkeys for right in values["right"]]
    return EvalRow(
        policy=policy,
        kv_type=kv_type,
        budget=budget,
        kept=_ratio(kept, "entries_kept", "entries_full"),
        kv_bytes=_mean(_column(kept, "kv_bytes_budget")),
        kv_bytes_full=_mean(_column(kept, "kv_bytes_full")),
        kl=_mean(divergences),
        kl_worst=max(divergences, default=None),
        top1=_mean(_column(texts, "top1")),
        perplexity_ratio=_mean(_column(texts, "perplexity_ratio")),
        greedy_equal=_mean(equal),
        greedy_identical=equal.count(1.0) if equal else None,
        prompt_speed=_ratio(texts, *_READ),
        decode_speed=_ratio(texts, *_WRITTEN),
        disagreement=max(map(disagreement, _speeds(texts)), default=None),
        recall=_mean(right),
        rouge1=_mean(_column(dataset, "rouge1")),
        rouge2=_mean(_column(dataset, "rouge2")),
        rouge_l=_mean(_column(dataset, "rougeL")),
        texts=len(texts),
        questions=len(right),
        answers=len(dataset) + len(suite),
        length=suite[0]["length"] if suite else None,
        question=suite[0]["question"] if suite else None,
        scores=scores,
        score=_mean([*scores.values()]),
    )


def _speeds(texts: Sequence[Values]) -> list[list[float]]:
    """Return the texts' speeds of reading and of writing, in tokens per second, if any."""
    speeds = [
        [text[tokens] / text[seconds] for text in texts if text.get(tokens) and text.get(seconds)]
        for tokens, seconds in (_READ, _WRITTEN)
    ]
    return [of_kind for of_kind in speeds if of_kind]


def _by_task(suite: Sequence[Values]) -> dict[str, float]:
    tasks = dict.fromkeys(values["task"] for values in suite)
    return {
        task: statistics.fmean(values["score"] for values in suite if values["task"] == task)
        for task in tasks
    }


def _column(values: Iterable[Values], name: str) -> list[float]:
    return [value[name] for value in values if name in value]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _ratio(values: Sequence[Values], above: str, below: str) -> float | None:
    divisor = sum(_column(values, below))
    return sum(_column(values, above)) / divisor if divisor else None
