"""Define the columns of an evaluation's tables, which the terminal and reports show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entropykv.evaluation.rows import EvalRow

MIB = 2.0**20


@dataclass(frozen=True)
class Column:
    """Hold the title of a column, and the function that writes its cell of a row: an empty text if
    the row has no such figure.
    """

    title: str
    cell: Callable[[EvalRow], str]


def number(value: float | None, style: str = "", scale: float = 1.0) -> str:
    """Return `value * scale` in a style of format(); None gives an empty text."""
    return "" if value is None else format(value * scale, style)


def share(part: float | None, whole: float | None) -> str:
    """Return a part of a whole in percent; an empty text if one is missing, or the whole is 0."""
    return "" if part is None or not whole else f"{part / whole:.1%}"


def _field(title: str, field: str, style: str, scale: float = 1.0) -> Column:
    return Column(title, lambda row: number(getattr(row, field), style, scale))


def _identical(row: EvalRow) -> str:
    return "" if row.greedy_identical is None else f"{row.greedy_identical} of {row.texts}"


SETTINGS = (Column("policy", lambda row: row.policy), Column("type", lambda row: row.kv_type))
SIZES = (
    Column("budget", lambda row: row.budget),
    _field("kept", "kept", ".1%"),
    _field("KV MiB", "kv_bytes", ",.2f", 1 / MIB),
    Column("of full f16", lambda row: share(row.kv_bytes, row.kv_bytes_full)),
)
OF_PARTS = {
    "continuations": (
        _field("KL", "kl", ".4f"),
        _field("worst text", "kl_worst", ".4f"),
        _field("top-1", "top1", ".3f"),
        _field("perplexity ratio", "perplexity_ratio", ".3f"),
        _field("greedy equal", "greedy_equal", ".1%"),
        Column("identical", _identical),
        _field("prompt tok/s", "prompt_speed", ",.0f"),
        _field("decode tok/s", "decode_speed", ",.1f"),
    ),
    "passkeys": (_field("facts recalled", "recall", ".1%"),),
    "dataset": (
        _field("ROUGE-1", "rouge1", ".3f"),
        _field("ROUGE-2", "rouge2", ".3f"),
        _field("ROUGE-L", "rouge_l", ".3f"),
    ),
}
"""The columns of each part of an evaluation that is no suite."""
OF_SUITES = (
    _field("mean", "score", ".1f", 100.0),
    _field("of full cache", "score_relative", ".1%"),
)


def of_task(task: str) -> Column:
    """Return the column of a suite's task, in percent."""
    return Column(task, lambda row: number(row.scores.get(task), ".1f", 100.0))
