"""Declare an option once, at the field that holds it, with help, limits and its names at each entry
point, and check the values that users give.

CacheOptions, Freezing, Recovery and Sampling declare their fields with option(). The arguments of
the command line (cli/options.py), the settings of the server (server/options.py), the limits of
requests (server/dialects/fields.py), the checks of the dataclasses and the table of the docs
(docs/generated_pages.py) are generated from it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, Protocol

from entropykv.errors import BudgetError, SettingsError

KV_TYPES = ("f16", "q8_0", "q8_0/iq4_nl")
"""The types that the extension stores: of K and V, or of K / of V. They are repeated here, so that
--help need not load the extension.
"""
KV_PARTS = {kv_type: (kv_type.split("/")[0], kv_type.split("/")[-1]) for kv_type in KV_TYPES}
"""The types of K and of V, by the names in KV_TYPES."""
KV_CHOICES = ("auto", *KV_TYPES)
STORES = ("auto", "headwise", "device", "flat")

MOST_TOKENS = 2**30
"""The most tokens of a context, and of everything counted in tokens: positions, distances, and sums
of two of them must fit into 32 bits in llama.cpp and in the extension.
"""
MOST_MICRO_BATCH = 2**16
MOST_THREADS = 512
"""The most threads that llama.cpp accepts."""
MOST_BYTES = 2**60

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_BYTES = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMG]?i?B)", re.IGNORECASE | re.ASCII)
_HOW = (
    "give a fraction in (0, 1] such as 0.2 or 20%, a number of tokens (2 or more), or bytes such "
    "as 64MiB"
)


def joint_kv_type(of_keys: str | None, of_values: str | None) -> str:
    """Return the first of KV_TYPES with K and V of these types; None: any type, so that only one
    may be None. Raises SettingsError if there is none.
    """
    for joint, (keys, values) in KV_PARTS.items():
        if of_keys in (None, keys) and of_values in (None, values):
            return joint
    asked = (f"{part} in {kind}" for part, kind in (("K", of_keys), ("V", of_values)) if kind)
    raise SettingsError(
        f"{' and '.join(asked)}: no store has these types; give --kv-type (kv_type) alone, as one "
        f"of {', '.join(KV_TYPES)}"
    )


def parse_bytes(text: str) -> int | None:
    """Return a size with its unit, such as `64MiB`, in bytes; None for any other text."""
    match = _BYTES.fullmatch(text.strip())
    return int(Fraction(match[1]) * _UNITS[match[2].upper()]) if match else None


@dataclass(frozen=True)
class Budget:
    """Hold how much the KV cache may keep: a fraction of the context, tokens per KV head, or bytes.

    `value` is the fraction, from 0 to 1, or the number of tokens or bytes, as `kind` says. In a
    pool of N conversations, a fraction refers to N contexts, so that it means the same for each of
    them as for one alone; tokens and bytes are for all conversations together.
    """

    kind: Literal["fraction", "tokens", "bytes"]
    value: float

    @classmethod
    def parse(cls, value: Budget | str | float) -> Budget:
        """Read `0.2`, `"20%"`, `512` or `"64MiB"`; raises BudgetError for an impossible value."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, str) and value.strip().endswith("%"):
            return cls._from_percent(value)
        n_bytes = parse_bytes(value) if isinstance(value, str) else None
        if n_bytes is None:
            return cls._from_number(value)
        if n_bytes < 1:
            raise BudgetError(f"a KV budget of {value} holds nothing; {_HOW}")
        if n_bytes > MOST_BYTES:
            raise BudgetError(f"a KV budget cannot be {value}; give {MOST_BYTES}B or less")
        return cls("bytes", n_bytes)

    @classmethod
    def _from_percent(cls, value: str) -> Budget:
        try:
            share = float(value.strip()[:-1]) / 100.0
        except ValueError:
            share = math.nan
        if not 0.0 < share <= 1.0:
            raise BudgetError(f"a KV budget cannot be {value!r}; {_HOW}")
        return cls("fraction", share)

    @classmethod
    def _from_number(cls, value: str | float) -> Budget:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            raise BudgetError(f"a KV budget cannot be {value!r}; {_HOW}") from None
        if 0.0 < number <= 1.0:
            return cls("fraction", number)
        if number > MOST_TOKENS:
            raise BudgetError(f"a KV budget cannot be {value}; give {MOST_TOKENS} tokens or less")
        if number >= 2.0 and number == int(number):
            return cls("tokens", int(number))
        raise BudgetError(f"a KV budget cannot be {value}; {_HOW}")

    def of_context(self, n_ctx: int) -> Budget:
        """Return the budget in tokens that a fraction means for a context; any other budget is
        returned unchanged.
        """
        if self.kind != "fraction":
            return self
        return Budget("tokens", max(2, round(self.value * n_ctx)))

    def __str__(self) -> str:
        """Return the text that a user would type: bytes in the largest unit that is exact."""
        if self.kind == "bytes":
            for unit in ("GiB", "MiB", "KiB"):
                if self.value % _UNITS[unit.upper()] == 0:
                    return f"{int(self.value) // _UNITS[unit.upper()]}{unit}"
            return f"{int(self.value)}B"
        return f"{self.value:g}" if self.kind == "fraction" else str(int(self.value))


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise SettingsError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise SettingsError(f"{name} cannot be {value!r}; use one of {', '.join(allowed)}")


def at_least(name: str, value: object, least: int, most: int = MOST_TOKENS) -> None:
    """Raise SettingsError unless `value` is an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} cannot be {value!r}; use an integer of {least} or more")
    if value > most:
        raise SettingsError(f"{name} cannot be {value}; use {most} or less")


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number, and no boolean."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


_METADATA = "option"
_AS_FIELD = object()


@dataclass(frozen=True)
class Option:
    """Hold the names of an option, what it does, and which values it accepts."""

    help: str
    """What the option does, without the default."""
    flags: tuple[str, ...] = ()
    """The option's names at the command line; empty: it exists only as a keyword argument and a
    setting.
    """
    setting: str = ""
    """The option's name in the server's settings; by default the name at the command line."""
    metavar: str | None = None
    kind: type = str
    """The type of the value that users type: str, int, float, or bool for a switch."""
    choices: tuple[str, ...] = ()
    least: float | None = None
    """The least number; None: the value is not a number, may be any number, or is checked
    elsewhere.
    """
    most: float = MOST_TOKENS
    default: Any = None
    """The default of the field."""
    instead: str | None = None
    """What None, or another special default, means."""
    at_server: Any = _AS_FIELD
    """The default of the server, if it differs."""
    label: str = ""
    """The option's name in errors, if that is not the name of the field."""
    group: str = ""
    """The group of the option: `schedule` (of policy rolling-freeze), `drafts`, `pool`, or
    `loading` (what a model is loaded with). Without a group, it can be set for a loaded model.
    """

    @property
    def name(self) -> str:
        """Return the option's name in the parsed command line: that of the first long flag, or of
        the setting without flags.
        """
        long = (flag for flag in self.flags if flag.startswith("--"))
        return next(long, self.setting).removeprefix("--").replace("-", "_")

    @property
    def server_name(self) -> str:
        """Return the option's name in the server's settings."""
        return self.setting or self.name

    @property
    def server_default(self) -> Any:
        """Return the option's default in the server's settings, as users type it."""
        if self.at_server is not _AS_FIELD:
            return self.at_server
        return str(self.default) if self.kind is str and self.default is not None else self.default

    @property
    def shown_default(self) -> str:
        """Return the text about the default in --help and the docs."""
        return str(self.default) if self.instead is None else self.instead


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:  # noqa: A002
    """Return a dataclass field that declares an option; `more` are fields of Option."""
    declared = Option(help, flags, default=default, **more)
    return dataclasses.field(default=default, metadata={_METADATA: declared})


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def declared(owner: _Dataclass | type[_Dataclass]) -> dict[str, Option]:
    """Return the options that a dataclass declares, by the names of its fields."""
    options = ((each.name, each.metadata.get(_METADATA)) for each in dataclasses.fields(owner))
    return {name: option for name, option in options if option is not None}


def of_group(owner: _Dataclass | type[_Dataclass], group: str) -> tuple[str, ...]:
    """Return the fields of a dataclass whose options belong to a group."""
    return tuple(name for name, each in declared(owner).items() if each.group == group)


def check_declared(values: _Dataclass) -> None:
    """Raise SettingsError for a value outside the limits or choices of its option."""
    for name, each in declared(values).items():
        value = getattr(values, name)
        if value is None and each.default is None:
            continue
        if each.kind is float:
            _check_number(each.label or name, value, each.least, each.most)
        elif each.least is not None:
            at_least(each.label or name, value, int(each.least), int(each.most))
        elif each.choices and isinstance(each.default, str):
            one_of(each.label or name, value, each.choices)


def _check_number(name: str, value: object, least: float | None, most: float) -> None:
    """Raise SettingsError unless `value` is a finite number, from `least` to `most` if there are
    such limits.
    """
    if not is_number(value) or (least is not None and not least <= value <= most):  # type: ignore[operator]
        limits = "" if least is None else f" from {least:g} to {most:g}"
        raise SettingsError(f"{name} cannot be {value!r}; use a number{limits}")
