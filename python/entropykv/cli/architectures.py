"""Print llama.cpp's architectures, and the stores that serve them, as a table."""

from __future__ import annotations

from entropykv.cli.table import format_columns
from entropykv.model.architectures import ArchitectureCheck, ArchitectureTable

Cells = tuple[str, ...]

_TITLES = (
    "architecture",
    "store",
    "one by one",
    "micro-batches",
    "greedy text",
    "half budget",
    "notes",
)


def format_architectures(table: ArchitectureTable) -> str:
    """Return a Markdown table that is readable as plain text, with an explanation and notes."""
    notes = _numbered_notes(table)
    cells = [_TITLES, *(_cells(row, table, notes) for row in table.rows)]
    sentences = [f"{number}. {sentence}" for sentence, number in notes.items()]
    return "\n".join(
        [*_about(table), "", format_columns(cells), *([""] if sentences else []), *sentences]
    )


def _about(table: ArchitectureTable) -> list[str]:
    return [
        "Each architecture was run as tiny models with random weights, under llama-cpp-python",
        f"{table.llama_cpp_python}, in the store that `--store auto` takes, and compared with "
        "llama.cpp alone",
        "(headwise: without flash attention; flat: with it): the error of the logits (root mean",
        "square, relative to their spread) where the tokens of a text are read one by one and in",
        "micro-batches, how many tokens of a greedy text are the same, and whether a longer text",
        "was read inside half the budget.",
    ]


def _numbered_notes(table: ArchitectureTable) -> dict[str, int]:
    sentences = dict.fromkeys(
        sentence for row in table.rows for sentence in (*row.notes, *row.failures)
    )
    return {sentence: number for number, sentence in enumerate(sentences, 1)}


def _cells(row: ArchitectureCheck, table: ArchitectureTable, notes: dict[str, int]) -> Cells:
    numbers = ", ".join(str(notes[sentence]) for sentence in (*row.notes, *row.failures))
    served = row.served
    if served is None:
        return (_name(row, table), row.store, *[""] * 4, numbers)
    return (
        _name(row, table),
        row.store,
        _error(served.one_by_one),
        _error(served.micro_batches),
        f"{served.greedy_equal} of {table.greedy_tokens}",
        "yes" if served.half_budget else "no",
        numbers,
    )


def _name(row: ArchitectureCheck, table: ArchitectureTable) -> str:
    """Return the architecture, with the models of the row if other models are served
    differently.
    """
    alike = [other for other in table.rows if other.architecture == row.architecture] == [row]
    return row.architecture if alike else f"{row.architecture} ({', '.join(row.models)})"


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"
