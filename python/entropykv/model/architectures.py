"""List which store serves which of llama.cpp's architectures, as checked with tiny models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.errors import SettingsError

PATH = Path(__file__).parent / "architectures.json"
"""The file that `make architectures` writes after running a tiny model of each architecture."""


@dataclass(frozen=True)
class Served:
    """Hold the figures of one store for the models that it serves; of several models, the worst
    ones.

    Errors of logits are root mean squares of the difference to stock llama.cpp, divided by the
    standard deviation of stock's logits.
    """

    one_by_one: float
    """The error if the tokens of a text are read one by one."""
    micro_batches: float
    """The error if the tokens of a text are read in micro-batches."""
    greedy_equal: int
    """How many tokens of a greedily written text equal those of stock."""
    half_budget: bool
    """True if a text that does not fit into a budget of half the context was read inside it."""


@dataclass(frozen=True)
class ArchitectureCheck:
    """Hold the results for one architecture; see `entropykv models --architectures`."""

    architecture: str
    """The name: general.architecture of the GGUF file."""
    store: str
    """The store that `--store auto` takes: headwise, flat, or none."""
    models: tuple[str, ...]
    """The names of the tiny models that were run."""
    limit: float
    """The largest error of logits that is considered rounding."""
    headwise: Served | None
    flat: Served | None
    notes: tuple[str, ...]
    """The messages of a store that refuses the models, or refuses to evict."""
    failures: tuple[str, ...] = ()
    """The checks that failed."""

    @property
    def served(self) -> Served | None:
        """Return the figures of the store that `--store auto` takes."""
        return self.headwise or self.flat


@dataclass(frozen=True)
class ArchitectureTable:
    """Hold the results for all architectures."""

    llama_cpp_python: str
    """The version of llama-cpp-python that the checks ran with."""
    greedy_tokens: int
    """The length of the greedy texts, in tokens."""
    rows: tuple[ArchitectureCheck, ...]

    def of(self, names: Iterable[str]) -> ArchitectureTable:
        """Return the rows of some architectures; raises SettingsError for a name that the table
        lacks.
        """
        known = {row.architecture for row in self.rows}
        wanted = set(names)
        for name in sorted(wanted - known):
            raise SettingsError(
                f"{name!r} is not one of the architectures that were checked; "
                "`entropykv models --architectures` lists those that were"
            )
        rows = tuple(row for row in self.rows if row.architecture in wanted)
        return dataclasses.replace(self, rows=rows)

    def to_json(self) -> str:
        """Return the table as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ArchitectureTable:
        """Read JSON text that to_json() wrote."""
        content = json.loads(text)
        return cls(**content | {"rows": tuple(map(_row, content["rows"]))})


def checked_architectures() -> ArchitectureTable:
    """Return the table that this package ships."""
    return ArchitectureTable.from_json(PATH.read_text(encoding="utf-8"))


def _row(content: dict[str, Any]) -> ArchitectureCheck:
    stores = {name: Served(**content[name]) for name in ("headwise", "flat") if content[name]}
    lists = {name: tuple(content[name]) for name in ("models", "notes", "failures")}
    return ArchitectureCheck(**content | stores | lists)
