"""Determine the models of `entropykv serve`: from -m and -hf, a directory, and a preset file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from entropykv.cli.parser import CommandParser
from entropykv.errors import SettingsError
from entropykv.model.shipped import local_models

if TYPE_CHECKING:
    from entropykv.server import ModelCatalog, ModelOptions, ServedModel, ServerOptions

Options = TypeVar("Options", "ModelOptions", "ServerOptions")
_OF_ONE = ("model", "hf_repo", "hf_file", "hf_model_repo_id", "model_alias")
"""Fields of ModelOptions that name a single model, and are not allowed with several."""


def models_of(
    options: argparse.Namespace, server: ServerOptions, parser: CommandParser
) -> ModelOptions | ModelCatalog:
    """Return the options of a single model, or the catalog of several.

    As in llama-server, options of the command line take precedence over a preset's section, and its
    section over [*]. Raises SettingsError for invalid options, and if several models have one name.
    """
    from entropykv.server import ModelCatalog, ModelOptions  # noqa: PLC0415

    named: list[str] = options.model or []
    if server.models_dir is None and server.models_preset is None and len(named) < 2:
        options.model = named[0] if named else None
        return read_options(ModelOptions, options)
    from entropykv.cli.models_preset import Presets, read_presets  # noqa: PLC0415  # it needs the server
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
    """Return the model called `name`, one of several models of a server.

    `given`: its options. `place`: the options that say where its file is; None: `given` or the name
    says it. Raises SettingsError if nothing says it, and for invalid options.
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
    """Return settings from the options that were given; raises SettingsError for an invalid one."""
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
