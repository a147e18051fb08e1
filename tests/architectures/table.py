"""Run the tiny models of all architectures, and write which store serves which.

python -m tests.architectures.table
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from entropykv._build_info import LLAMA_CPP_PYTHON_VERSION
from entropykv.model.architectures import ArchitectureCheck, ArchitectureTable, Served
from tests.architectures import MODELS, Architecture
from tests.architectures.checks import GREEDY_TOKENS, check, worst

ROOT = Path(__file__).resolve().parents[2]
JSON = "python/entropykv/model/architectures.json"

Check = Callable[[Architecture], ArchitectureCheck]


def main(
    models: Iterable[Architecture] = tuple(MODELS.values()),
    check: Check = check,
    folder: Path = ROOT,
) -> int:
    """Write the table below a folder; return 1, with messages on stderr, if a check failed."""
    with closing(_Worker(check)) as worker:
        rows = merged(map(worker, models))
    table = ArchitectureTable(LLAMA_CPP_PYTHON_VERSION, GREEDY_TOKENS, rows)
    write(folder / JSON, table.to_json())
    failures = [failure for row in rows for failure in row.failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    stores = [row.store for row in rows]
    counts = ", ".join(f"{name} {stores.count(name)}" for name in ("headwise", "flat", "none"))
    print(f"{len(rows)} rows: {counts}; {len(failures)} checks failed")
    return 1 if failures else 0


def merged(checks: Iterable[ArchitectureCheck]) -> tuple[ArchitectureCheck, ...]:
    """Return one row for all models of an architecture that are served equally, sorted by name."""
    rows: dict[tuple[str, str, tuple[str, ...]], ArchitectureCheck] = {}
    for found in checks:
        key = found.architecture, found.store, found.notes
        rows[key] = _worst(rows[key], found) if key in rows else found
    return tuple(sorted(rows.values(), key=lambda row: (row.architecture, row.models)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class _Worker:
    """Run checks in a process of their own, because llama.cpp may end it."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._pool = _new_pool()

    def __call__(self, model: Architecture) -> ArchitectureCheck:
        try:
            return self._pool.submit(self._check, model).result()
        except BrokenProcessPool:
            self._pool = _new_pool()
            return _failed(model, "the process ended")
        except Exception as error:
            return _failed(model, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._pool.shutdown()


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _failed(model: Architecture, why: str) -> ArchitectureCheck:
    return ArchitectureCheck(
        architecture=model.architecture,
        store="none",
        models=(model.name,),
        limit=model.rounding,
        headwise=None,
        flat=None,
        notes=(),
        failures=(f"{model.name}: {why}",),
    )


def _worst(one: ArchitectureCheck, other: ArchitectureCheck) -> ArchitectureCheck:
    return replace(
        one,
        models=(*one.models, *other.models),
        limit=max(one.limit, other.limit),
        headwise=_worst_figures(one.headwise, other.headwise),
        flat=_worst_figures(one.flat, other.flat),
        failures=(*one.failures, *other.failures),
    )


def _worst_figures(one: Served | None, other: Served | None) -> Served | None:
    return worst(one, other) if one and other else None


if __name__ == "__main__":
    sys.exit(main())
