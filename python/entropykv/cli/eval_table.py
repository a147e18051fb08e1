"""Print the figures of an evaluation as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entropykv.evaluation.reading import EvalPart
from entropykv.evaluation.rows import EvalRow
from entropykv.evaluation.ruler.scores import RulerPart


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[EvalRow], str]


def _number(field: str, style: str, scale: float = 1.0) -> Callable[[EvalRow], str]:
    def cell(row: EvalRow) -> str:
        value = getattr(row, field)
        return "" if value is None else format(value * scale, style)

    return cell


def _share_of_full(row: EvalRow) -> str:
    if row.kv_bytes is None or not row.kv_bytes_full:
        return ""
    return f"{row.kv_bytes / row.kv_bytes_full:.1%}"


def _identical(row: EvalRow) -> str:
    return "" if row.greedy_identical is None else f"{row.greedy_identical} of {row.texts}"


_COMMON = (
    _Column("policy", lambda row: row.policy),
    _Column("type", lambda row: row.kv_type),
    _Column("budget", lambda row: row.budget),
    _Column("kept", _number("kept", ".1%")),
    _Column("KV MiB", _number("kv_bytes", ".1f", 2.0**-20)),
    _Column("of full f16", _share_of_full),
)
_PARTS = {
    "continuations": (
        _Column("KL", _number("kl", ".4f")),
        _Column("worst text", _number("kl_worst", ".4f")),
        _Column("top-1", _number("top1", ".3f")),
        _Column("perplexity ratio", _number("perplexity_ratio", ".3f")),
        _Column("greedy equal", _number("greedy_equal", ".1%")),
        _Column("identical", _identical),
        _Column("prompt tok/s", _number("prompt_speed", ".0f")),
        _Column("decode tok/s", _number("decode_speed", ".0f")),
    ),
    "passkeys": (_Column("facts recalled", _number("recall", ".1%")),),
    "dataset": (
        _Column("ROUGE-1", _number("rouge1", ".3f")),
        _Column("ROUGE-2", _number("rouge2", ".3f")),
        _Column("ROUGE-L", _number("rouge_l", ".3f")),
    ),
}
_SUITE = (
    _Column("mean", _number("score", ".1f", 100.0)),
    _Column("of full cache", _number("score_relative", ".1%")),
)


def _score_of(task: str) -> Callable[[EvalRow], str]:
    def cell(row: EvalRow) -> str:
        return f"{100 * row.scores[task]:.1f}" if task in row.scores else ""

    return cell


class EvalTable:
    """Format a table that has the columns of the measured parts."""

    def __init__(self, parts: Sequence[EvalPart]) -> None:
        """Use the columns of these parts, or those of the suite if there is one."""
        self._title = ""
        self._columns = list(_COMMON)
        for part in parts:
            if isinstance(part, RulerPart):
                self._title = part.title + "\n\n"
                self._columns += [_Column(task, _score_of(task)) for task in part.tasks]
                self._columns += _SUITE
            else:
                self._columns += _PARTS[part.name]

    def header(self) -> str:
        """Return the lines above the rows."""
        titles = " | ".join(column.title for column in self._columns)
        return f"{self._title}| {titles} |\n{'|---' * len(self._columns)}|"

    def line(self, row: EvalRow) -> str:
        """Return one row as a line."""
        return f"| {' | '.join(column.cell(row) for column in self._columns)} |"
