"""Read llama-server's presets: an INI file with the names of models, and the options of each."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entropykv.cli.llama_flags import flag_named
from entropykv.cli.parser import CommandParser
from entropykv.errors import SettingsError
from entropykv.files import read_text
from entropykv.server.dialects.fields import MOST_NAME
from entropykv.server.options import MOST_MODELS, ModelOptions

MOST_PRESET = 1 << 20
"""The most characters of a preset file."""
ALL = "*"
"""The section whose options apply to all models."""
_SECTION = re.compile(r"\[([^\]]+)\]")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*(.*)")
_COMMENT = re.compile(r"\s*[;#].*")
_TRUE = ("1", "on", "true", "enabled", "yes")
_FALSE = ("0", "off", "false", "disabled", "no")
_STARTUP = "load-on-startup"
_SKIPPED = ("version", "stop-timeout")
"""Keys without effect here; unloading never interrupts an answer, so it needs no timeout."""


@dataclass(frozen=True)
class Preset:
    """Hold the options of a model in a section."""

    given: Mapping[str, Any]
    """Values of fields of ModelOptions, as the command line would set them."""
    load_on_startup: bool = False


@dataclass(frozen=True)
class Presets:
    """Hold what a file says of all models, and of each that has a section of its own."""

    common: Preset = Preset({})
    sections: Mapping[str, Preset] = field(default_factory=dict)

    def of(self, name: str) -> Preset:
        """Return the options that the file gives to a model."""
        return self.sections.get(name, self.common)


def read_presets(path: str, parser: CommandParser) -> Presets:
    """Return the presets of a file; each section has the options of [*] that it does not set.

    The keys are options of `parser`, without their dashes. Raises SettingsError, which names the
    section, for a file that cannot be read, a key that is not an option of a model, and an invalid
    value.
    """
    text = read_text(path, SettingsError)
    if len(text) > MOST_PRESET:
        raise SettingsError(f"{path}: a preset may have {MOST_PRESET:,} characters; shorten it")
    sections = _sections_of(path, text)
    common = _preset_of(path, ALL, sections.pop(ALL, {}), parser)
    if len(sections) > MOST_MODELS:
        raise SettingsError(f"{path}: it names {len(sections)} models; {MOST_MODELS} are the most")
    presets = {}
    for name, keys in sections.items():
        own = _preset_of(path, name, keys, parser)
        starts = own.load_on_startup if _STARTUP in keys else common.load_on_startup
        presets[name] = Preset({**common.given, **own.given}, starts)
    return Presets(common, presets)


def _sections_of(path: str, text: str) -> dict[str, dict[str, str]]:
    """Return keys and values of every section, without those before the first; raises SettingsError
    for an invalid line.
    """
    sections: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = _COMMENT.sub("", line).strip()
        if not said:
            continue
        section, entry = _SECTION.fullmatch(said), _KEY.fullmatch(said)
        if section is not None:
            name = section[1].strip()
            if name in sections or len(name) > MOST_NAME:
                raise SettingsError(
                    f"{path}, line {number}: [{name[:MOST_NAME]}] is there twice, or too long; "
                    "name each model once"
                )
            keys = sections[name] = {}
        elif entry is None or entry[1] in keys:
            raise SettingsError(
                f"{path}, line {number}: {said[:60]!r} is neither [NAME] nor a new KEY = VALUE"
            )
        else:
            keys[entry[1]] = entry[2]
    return sections


def _preset_of(path: str, name: str, keys: Mapping[str, str], parser: CommandParser) -> Preset:
    starts = keys.get(_STARTUP, "false").lower()
    words: list[str] = []
    try:
        if starts not in (*_TRUE, *_FALSE):
            raise SettingsError(f"{_STARTUP} is true or false")
        for key, value in keys.items():
            if key not in (*_SKIPPED, _STARTUP):
                words += _words_of(key, value, parser)
        found, _ = parser.parse_known_args(words, argparse.Namespace())
        given = {name: value for name, value in vars(found).items() if value is not None}
        strange = sorted(given.keys() - ModelOptions.model_fields.keys())
        if strange:
            raise SettingsError(
                f"{strange[0].replace('_', '-')} is an option of the whole server; give it on the "
                "command line"
            )
    except SettingsError as error:
        raise SettingsError(f"{path}, [{name}]: {error}") from None
    return Preset(given, starts in _TRUE)


def _words_of(key: str, value: str, parser: CommandParser) -> list[str]:
    """Return the words of a command line that say the same; in a preset, a switch has a value.
    Raises SettingsError for an unknown key, or if a switch is neither on nor off.
    """
    known = parser._option_string_actions  # noqa: SLF001
    names = [dashes + key for dashes in ("--", "-")]
    flag = next((name for name in names if name in known or flag_named(name)), None)
    if flag is None:
        raise SettingsError(f"{key!r} is not an option; see entropykv serve --help")
    action, foreign = known.get(flag), flag_named(flag)
    is_switch = action.nargs == 0 if action is not None else foreign and foreign.values == "0"
    if not is_switch:
        return [f"{flag}={value}"]
    if value.lower() in _TRUE:
        return [flag]
    if value.lower() not in _FALSE:
        raise SettingsError(f"{key} is true or false")
    opposite = f"--no-{key}"
    return [opposite] if opposite in known or flag_named(opposite) else []
