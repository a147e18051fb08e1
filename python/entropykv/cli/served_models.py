"""Determine the models of `entropykv serve`: from -m and -hf, a directory, and a preset file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from entropykv.cli.llama_flags import flag_named
from entropykv.cli.parser import CommandParser
from entropykv.errors import SettingsError
from entropykv.files import read_text
from entropykv.model.shipped import local_models
from entropykv.server.dialects.fields import MOST_NAME
from entropykv.server.options import MOST_MODELS, ModelOptions

if TYPE_CHECKING:
    from entropykv.server import ModelCatalog, ServedModel, ServerOptions


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
    """Return the presets of a file; what [*] says is in each of them.

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
    """Return keys and values of every section; those before the first section belong to no
    model.
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
    """Return the equivalent words of a command line; in a preset, a switch has a value."""
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


Options = TypeVar("Options", "ModelOptions", "ServerOptions")
_OF_ONE = ("model", "hf_repo", "hf_file", "hf_model_repo_id", "model_alias")
"""Fields of ModelOptions that name a single model, and are not allowed with several."""


def models_of(
    options: argparse.Namespace, server: ServerOptions, parser: CommandParser
) -> ModelOptions | ModelCatalog:
    """Return the options of a single model, or the catalog of several.

    As in llama-server, options of the command line take precedence over a preset's section, and its
    section over [*]. Raises SettingsError.
    """
    from entropykv.server import ModelCatalog, ModelOptions  # noqa: PLC0415

    named: list[str] = options.model or []
    if server.models_dir is None and server.models_preset is None and len(named) < 2:
        options.model = named[0] if named else None
        return read_options(ModelOptions, options)
    from entropykv.cli.served_models import Presets, read_presets  # noqa: PLC0415  # it needs the server
    from entropykv.server.models.catalog import models_in, name_of, projector_beside  # noqa: PLC0415

    if options.model_alias is not None:
        raise SettingsError(
            "--alias names a single model; with several, give names in a preset (--models-preset)"
        )
    places: dict[str, dict[str, Any]] = {}
    local = {model.name for model in local_models()}
    for model in named:
        _add(places, model if model in local else name_of(model), {"model": model})
    if options.hf_repo is not None:
        place = {"hf_repo": options.hf_repo, "hf_file": options.hf_file}
        _add(places, options.hf_repo, place)
    default = next(iter(places), None)
    for name, path in models_in(server.models_dir).items() if server.models_dir else ():
        place = {"model": str(path)}
        if (projector := projector_beside(path, str(server.models_dir))) is not None:
            place["mmproj"] = str(projector)
        _add(places, name, place)
    preset = server.models_preset
    presets = Presets() if preset is None else read_presets(preset, parser)
    own = {
        name: value for name, value in _given(ModelOptions, options).items() if name not in _OF_ONE
    }
    models = []
    for name in dict.fromkeys([*places, *presets.sections]):
        said = presets.of(name)
        given = {**said.given, **own}
        starts = said.load_on_startup
        models.append(_served(name, given, places.get(name), load_on_startup=starts))
    return ModelCatalog.of_several(models, default)


def _add(places: dict[str, dict[str, Any]], name: str, place: dict[str, Any]) -> None:
    if name in places:
        raise SettingsError(
            f"two models are called {name}; rename a file, or name it in a preset (--models-preset)"
        )
    places[name] = place


def _served(
    name: str, given: dict[str, Any], place: Mapping[str, Any] | None, *, load_on_startup: bool
) -> ServedModel:
    """Return one of several models; without a `place`, its preset or its name determines
    the file.
    """
    from entropykv.server import ModelOptions, ServedModel  # noqa: PLC0415

    aliases = [alias.strip() for alias in (given.pop("model_alias", None) or "").split(",")]
    if place is not None:
        given = {**place, **{key: each for key, each in given.items() if key not in _OF_ONE}}
    elif "model" in given:
        given["model"] = given["model"][0]
    elif "hf_repo" not in given:
        if any(model.name == name for model in local_models()):
            given["model"] = name
        elif "/" in name and _names_a_repository(name):
            given["hf_repo"] = name
        else:
            raise SettingsError(
                f"the preset [{name}] says no model; give it a line such as model = FILE.gguf"
            )
    # Otherwise, missing values would be read from variables such as ENTROPYKV_MODEL.
    given = {"model": "", "hf_repo": None, "hf_file": None, "hf_model_repo_id": None, **given}
    try:
        options = _checked(ModelOptions, given)
    except SettingsError as error:
        raise SettingsError(f"model {name}: {error}") from None
    return ServedModel.of(
        name, options, [each for each in aliases if each], load_on_startup=load_on_startup
    )


def _names_a_repository(name: str) -> bool:
    """Tell whether a name is user/model of the hub; raises MissingExtraError without its extra."""
    from entropykv.hub.model_choice import Reference  # noqa: PLC0415

    return Reference.is_one(name)


def read_options(kind: type[Options], options: argparse.Namespace) -> Options:
    """Return settings from the options that were given; raises SettingsError."""
    return _checked(kind, _given(kind, options))


def _given(kind: type[Options], options: argparse.Namespace) -> dict[str, Any]:
    fields = kind.model_fields
    given = {name: each for name, each in vars(options).items() if name in fields}
    return {name: value for name, value in given.items() if value is not None}


def _checked(kind: type[Options], given: Mapping[str, Any]) -> Options:
    from pydantic import ValidationError  # noqa: PLC0415

    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        where = f"--{name}: " if name else ""
        said = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{where}{said}; see entropykv serve --help") from None
