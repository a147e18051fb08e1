"""Declare an option once, at the field that holds it: help, limits, and its names at each entry
point.

CacheOptions, Freezing, Recovery and Sampling declare their fields with option(). The arguments of
the command line (cli/options.py), the settings of the server (server/options.py), the limits of
requests (server/dialects/fields.py), the checks of the dataclasses and the table of the docs
(docs/generated_pages.py) are generated from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from entropykv.errors import SettingsError
from entropykv.settings.options import MOST_TOKENS, at_least, is_number, one_of

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
        """Return its name in the parsed command line: that of the first long flag."""
        long = (flag for flag in self.flags if flag.startswith("--"))
        return next(long, self.setting).removeprefix("--").replace("-", "_")

    @property
    def server_name(self) -> str:
        """Return its name in the server's settings."""
        return self.setting or self.name

    @property
    def server_default(self) -> Any:
        """Return its default in the server's settings, as users type it."""
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
