"""Say which store serves which of llama.cpp's architectures, as it was checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.errors import SettingsError

PATH = Path(__file__).parent / "architectures.json"
"""The file that `make architectures` writes: it runs a tiny model of each architecture."""


@dataclass(frozen=True)
class Served:
    """Hold what one store made of the models that it serves: the worst figures of them.

    Errors of logits are root mean squares of the difference to stock llama.cpp, relative to the
    standard deviation of stock's logits.
    """

    one_by_one: float
    """The error where the tokens of a text are read one by one."""
    micro_batches: float
    """The error where they are read in micro-batches."""
    greedy_equal: int
    """How many tokens of a greedy text are those of stock."""
    half_budget: bool
    """True where a text longer than half the budget was read inside half the budget."""


@dataclass(frozen=True)
class ArchitectureCheck:
    """Hold what was found about an architecture; see `entropykv models --architectures`."""

    architecture: str
    """The name: general.architecture of the GGUF file."""
    store: str
    """The store that `--store auto` takes: headwise, flat, or none."""
    models: tuple[str, ...]
    """The names of the tiny models that were run."""
    limit: float
    """The largest error of logits that passes for rounding."""
    headwise: Served | None
    flat: Served | None
    notes: tuple[str, ...]
    """What a store says that refuses the models, or refuses to evict."""
    failures: tuple[str, ...] = ()
    """The checks that failed."""

    @property
    def served(self) -> Served | None:
        """Return the figures of the store that `--store auto` takes."""
        return self.headwise or self.flat


@dataclass(frozen=True)
class ArchitectureTable:
    """Hold what was found about every architecture."""

    llama_cpp_python: str
    """The version of llama-cpp-python that the checks ran with."""
    greedy_tokens: int
    """The length of the greedy texts, in tokens."""
    rows: tuple[ArchitectureCheck, ...]

    def of(self, names: Iterable[str]) -> ArchitectureTable:
        """Return the table of some architectures; raises SettingsError for a name it lacks."""
        known = {row.architecture for row in self.rows}
        wanted = set(names)
        for name in sorted(wanted - known):
            raise SettingsError(
                f"{name!r} is no architecture that was checked; "
                "`entropykv models --architectures` lists those that were"
            )
        rows = tuple(row for row in self.rows if row.architecture in wanted)
        return dataclasses.replace(self, rows=rows)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ArchitectureTable:
        """Read what to_json() wrote."""
        content = json.loads(text)
        return cls(**content | {"rows": tuple(map(_row, content["rows"]))})


def checked_architectures() -> ArchitectureTable:
    """Return the table that comes with this package."""
    return ArchitectureTable.from_json(PATH.read_text(encoding="utf-8"))


def _row(content: dict[str, Any]) -> ArchitectureCheck:
    stores = {name: Served(**content[name]) for name in ("headwise", "flat") if content[name]}
    lists = {name: tuple(content[name]) for name in ("models", "notes", "failures")}
    return ArchitectureCheck(**content | stores | lists)
