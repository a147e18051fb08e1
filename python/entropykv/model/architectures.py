"""Which store serves which of llama.cpp's architectures, as it was checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.errors import SettingsError

PATH = Path(__file__).parent / "architectures.json"
"""Written by `make architectures`, which runs a tiny model of each."""


@dataclass(frozen=True)
class Served:
    """What one store made of models that it serves: the worst of them.

    Errors of logits are root mean squares of the difference to stock llama.cpp, relative to the
    standard deviation of stock's logits.
    """

    one_by_one: float
    """Error where the tokens of a text are read one by one."""
    micro_batches: float
    """Error where they are read in micro-batches."""
    greedy_equal: int
    """Tokens of a greedy text that are those of stock."""
    half_budget: bool
    """Whether a text that is longer than half the budget was read inside half the budget."""


@dataclass(frozen=True)
class ArchitectureCheck:
    """What was found about an architecture; see `entropykv models --architectures`."""

    architecture: str
    """general.architecture of the GGUF file."""
    store: str
    """What `--store auto` takes: headwise, flat, or none."""
    models: tuple[str, ...]
    """Names of the tiny models that were run."""
    limit: float
    """Largest error of logits that passes for rounding."""
    headwise: Served | None
    flat: Served | None
    notes: tuple[str, ...]
    """What a store says that refuses the models, or to evict."""
    failures: tuple[str, ...] = ()
    """Checks that failed."""

    @property
    def served(self) -> Served | None:
        """Figures of the store that `--store auto` takes."""
        return self.headwise or self.flat


@dataclass(frozen=True)
class ArchitectureTable:
    """What was found about every architecture."""

    llama_cpp_python: str
    """Version that the checks ran with."""
    greedy_tokens: int
    """Length of the greedy texts."""
    rows: tuple[ArchitectureCheck, ...]

    def of(self, names: Iterable[str]) -> ArchitectureTable:
        """The table of some architectures; SettingsError for a name that it does not have."""
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
        """The text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ArchitectureTable:
        """Read what to_json() wrote."""
        content = json.loads(text)
        return cls(**content | {"rows": tuple(map(_row, content["rows"]))})


def checked_architectures() -> ArchitectureTable:
    """The table of this package."""
    return ArchitectureTable.from_json(PATH.read_text(encoding="utf-8"))


def _row(content: dict[str, Any]) -> ArchitectureCheck:
    stores = {name: Served(**content[name]) for name in ("headwise", "flat") if content[name]}
    lists = {name: tuple(content[name]) for name in ("models", "notes", "failures")}
    return ArchitectureCheck(**content | stores | lists)
