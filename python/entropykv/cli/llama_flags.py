"""List every flag of llama.cpp's tools (llama-cli, llama-completion, llama-server), and how
entropykv treats it.

The flags are those of the llama.cpp version in llama-cpp-python 0.3.36 (common/arg.cpp), and some
of earlier versions that are still in use. The table is llama_flags.txt; the parser of the commands,
the tests and the page of the docs about flags (docs/generated_pages.py) all use it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import SettingsError

CLI, SERVER, COMPLETION, FORMER = "csp-"
"""Letters in a row of the table for the tools that have a flag: llama-cli, llama-server,
llama-completion, and earlier versions of any of them.
"""

_COMMANDS = ("run", "chat", "serve")
"""The commands that accept command lines of llama.cpp."""


class Use(enum.Enum):
    """Define how a command treats a flag."""

    TAKEN = "taken"
    NOTED = "taken with a note"
    REFUSED = "refused"


@dataclass(frozen=True)
class Treatment:
    """Hold how a command treats a flag, and why."""

    use: Use
    why: str = ""
    """Why a noted flag changes nothing, or what to do instead of a refused one."""
    unless: tuple[str, ...] = ()
    """Values with which a refused flag changes nothing, so that it is accepted with a note."""
    places_weights: bool = False
    """If true, the flag is refused only if there is a device that weights could be placed on."""


@dataclass(frozen=True)
class LlamaFlag:
    """Hold one flag of llama.cpp with all of its spellings."""

    names: tuple[str, ...]
    tools: str
    """The letters of the tools that have the flag."""
    values: str
    """How many values follow the flag: 0, 1 or 2; `?` means one, unless another flag follows."""
    run: Treatment
    chat: Treatment
    serve: Treatment

    def at(self, command: str) -> Treatment:
        """Return how a command treats the flag; other commands than `run`, `chat` and `serve` treat
        it as `run` does.
        """
        treatment: Treatment = getattr(self, command if command in _COMMANDS else "run")
        return treatment

    def count_values(self, following: Sequence[str]) -> int:
        """Return how many of the following words are values of the flag.

        Raises SettingsError if there are too few.
        """
        if self.values == "?":
            return int(bool(following) and not following[0].startswith("-"))
        count = int(self.values)
        if len(following) < count:
            raise SettingsError(f"{self.names[-1]} needs {count} value{'s'[: count - 1]} behind it")
        return count


def _treatment(told: str) -> Treatment:
    """Read what the table says of a flag: `use: why`, or `use unless VALUE...: why`."""
    use, _, why = told.partition(": ")
    use, _, unless = use.partition(" unless ")
    if use == "placed":
        return Treatment(Use.REFUSED, why, places_weights=True)
    return Treatment(Use[use.upper()], why, tuple(unless.split()))


def _flags_of_table() -> Iterator[LlamaFlag]:
    """Yield the flags of llama_flags.txt, whose first lines describe the format."""
    table = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for group in table.split("\n\n")[1:]:
        at: dict[str, Treatment] = {}
        for line in group.splitlines():
            command, colon, told = line.partition(": ")
            if colon:
                at[command] = _treatment(told)
                continue
            tools, values, *names = line.split()
            run, chat, serve = (at.get(command, at["run"]) for command in _COMMANDS)
            yield LlamaFlag(tuple(names), tools, values, run, chat, serve)


FLAGS: tuple[LlamaFlag, ...] = tuple(_flags_of_table())
"""All flags, grouped by their treatment."""


@functools.cache
def _by_name() -> dict[str, LlamaFlag]:
    return {name: flag for flag in FLAGS for name in flag.names}


def flag_named(name: str) -> LlamaFlag | None:
    """Return the flag with this spelling; None if llama.cpp has no such flag."""
    return _by_name().get(name)


def flags_of(tools: str) -> list[LlamaFlag]:
    """Return the flags that any of `tools` has, which are letters as in LlamaFlag.tools."""
    return [flag for flag in FLAGS if set(flag.tools) & set(tools)]


def count_uses(tools: str, command: str) -> dict[Use, int]:
    """Return how many flags of llama.cpp's tools a command treats in each way; `tools`: letters as
    in LlamaFlag.tools.
    """
    uses = [flag.at(command).use for flag in flags_of(tools)]
    return {use: uses.count(use) for use in Use}
