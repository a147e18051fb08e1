"""Keep results in a file that survives an interruption, and make tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import AGREEMENT, FACTS, GREEDY, RULER, SPEED, Method, Result

COLUMNS = {
    AGREEMENT: ("kept", "bytes", "kl", "kl_worst", "top1", "perplexity_ratio"),
    GREEDY: ("kept", "bytes", "equal", "equal_worst", "first_difference"),
    SPEED: ("prompt_speed", "decode_speed"),
    FACTS: ("kept", "bytes", "score"),
    RULER: ("kept", "bytes", "score"),
}
"""The figures that are shown for each measure; RULER's scores are also shown for each task."""

_TITLES = {
    "kept": "entries",
    "bytes": "bytes held",
    "kl": "KL",
    "kl_worst": "worst text",
    "top1": "top-1",
    "perplexity_ratio": "perplexity ratio",
    "equal": "equal tokens",
    "equal_worst": "worst text",
    "first_difference": "first difference",
    "prompt_speed": "prompt tok/s",
    "decode_speed": "decode tok/s",
    "score": "mean score",
}
_FORMATS = {
    "kept": "{:.1%}",
    "bytes": "{:.1%}",
    "kl": "{:.4f}",
    "kl_worst": "{:.4f}",
    "top1": "{:.3f}",
    "perplexity_ratio": "{:.3f}",
    "equal": "{:.3f}",
    "equal_worst": "{:.3f}",
    "first_difference": "{:.1f}",
    "prompt_speed": "{:.0f}",
    "decode_speed": "{:.1f}",
    "score": "{:.3f}",
}


class ResultFile:
    """Keep a JSON line for every method and text, so that none is measured again."""

    def __init__(self, path: Path | None) -> None:
        """Read the results of an earlier run, if any; an incomplete line is measured again."""
        self._path = path
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        self.results = [result for line in text.splitlines() if (result := _read(line)) is not None]

    def pending(self, methods: Iterable[Method], text: str, protocol: str) -> list[Method]:
        """Return the methods that have no result for this text and protocol."""
        done = {r.method for r in self.results if (r.text, r.protocol) == (text, protocol)}
        return [method for method in methods if method not in done]

    def add(self, result: Result) -> None:
        """Add a result, and write it to disk at once if there is a file."""
        self.results.append(result)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before = self._path.read_bytes()[-1:] if self._path.exists() else b""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if before not in (b"", b"\n") else "") + json.dumps(result.as_json()))
            file.write("\n")


def _read(line: str) -> Result | None:
    try:
        return Result.from_json(json.loads(line))
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def summarise(
    results: Iterable[Result], texts: Sequence[str], protocol: str
) -> list[dict[str, Any]]:
    """Return a row for every method: means over its texts, and the worst of them.

    The rows are sorted by measure, then by keep ratio from the largest down, then from the best row
    down.
    """
    groups: dict[Method, dict[str, dict[str, float]]] = {}
    for result in results:
        if result.protocol == protocol and result.text in texts:
            groups.setdefault(result.method, {})[result.text] = result.figures
    rows = [_row(method, by_text) for method, by_text in groups.items()]
    return sorted(rows, key=lambda row: (row["measure"], -row["keep"], _worse_than_best(row)))


def _worse_than_best(row: dict[str, Any]) -> float:
    """Return the sort key of a row within its measure; the best row has the smallest."""
    for name, sign in (("kl", 1), ("equal", -1), ("score", -1), ("prompt_speed", -1)):
        if name in row:
            return float(sign * row[name])
    return 0.0


def _row(method: Method, by_text: dict[str, dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: getattr(method, name) for name in ("measure", "framework", "name", "kv_type", "keep")
    }
    figures = list(by_text.values())
    row["texts"] = len(figures)
    for name in figures[0]:
        row[name] = _mean([each[name] for each in figures])
    if "kl" in row:
        row["kl_worst"] = max(each["kl"] for each in figures)
    if "equal" in row:
        row["equal_worst"] = min(each["equal"] for each in figures)
    if "score" in row:
        row["tasks"] = _by_task(by_text)
        row["score"] = _mean([*row["tasks"].values()])
    return row


def _by_task(by_text: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the mean scores of texts whose names differ only in the number at their end."""
    tasks: dict[str, list[float]] = {}
    for name, figures in by_text.items():
        tasks.setdefault(name.rpartition(" ")[0], []).append(figures["score"])
    return {task: _mean(scores) for task, scores in tasks.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(rows: Sequence[dict[str, Any]], measure: str) -> str:
    """Return the rows of one measure as a Markdown table; empty if there are none."""
    chosen = [row for row in rows if row["measure"] == measure]
    if not chosen:
        return ""
    columns = COLUMNS[measure]
    tasks = list(dict.fromkeys(task for row in chosen for task in row.get("tasks", ())))
    titles = ["framework", "method", "type", "keep", *(_TITLES[c] for c in columns), *tasks]
    lines = [_line([*titles, "texts"]), "|" + "---|" * (len(titles) + 1)]
    for row in chosen:
        values = [_FORMATS[c].format(row[c]) for c in columns]
        values += [f"{row['tasks'][task]:.3f}" if task in row["tasks"] else "" for task in tasks]
        first = [row["framework"], row["name"], row["kv_type"], f"{row['keep']:g}"]
        lines.append(_line([*first, *values, str(row["texts"])]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
