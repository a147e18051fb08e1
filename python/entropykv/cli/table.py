"""Format tables of several columns."""

from __future__ import annotations


def format_columns(rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table that is readable as plain text; the first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line_of(row, widths) for row in rows]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def _line_of(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
