"""List the models of a server, each with its options, and whether it is loaded at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from entropykv.errors import SettingsError
from entropykv.model.identity import SplitName
from entropykv.server.dialects.fields import MOST_NAME
from entropykv.server.options import MOST_MODELS, ModelOptions

_PROJECTOR = "mmproj"
"""Part of the names of GGUF files with image projectors, which belong to a model but are not
models.
"""


@dataclass(frozen=True)
class ServedModel:
    """Name a model of a server, and hold its options."""

    name: str
    options: ModelOptions
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for the model."""
    load_on_startup: bool = False
    """True to load it when the server starts; false to load it when a request first needs it."""

    @classmethod
    def of(
        cls,
        name: str,
        options: ModelOptions,
        aliases: Sequence[str] = (),
        *,
        load_on_startup: bool = False,
    ) -> ServedModel:
        """Return a model whose options have the same name; raises SettingsError for an impossible
        name or alias.
        """
        for each in (name, *aliases):
            if not 0 < len(each) <= MOST_NAME or not each.isprintable():
                raise SettingsError(
                    f"{each[:MOST_NAME]!r} is not a name of a model; give 1 to {MOST_NAME} "
                    "characters that can be printed"
                )
        named = options.model_copy(update={"model_alias": name})
        return cls(name, named, tuple(aliases), load_on_startup)


@dataclass(frozen=True)
class ModelCatalog:
    """List the models of a server in order."""

    models: tuple[ServedModel, ...]
    default: str | None = None
    """The model for requests that name none; None: requests must name one."""
    any_name: bool = False
    """True if every name in a request means the only model, as in a server of one model."""

    def __post_init__(self) -> None:
        """Raise SettingsError for no model, too many models, or a name that two models have."""
        if not 0 < len(self.models) <= MOST_MODELS:
            raise SettingsError(
                f"there are {len(self.models)} models; a server has 1 to {MOST_MODELS}"
            )
        self._check_names()

    def check_startup(self, most: int | None) -> None:
        """Raise SettingsError if more models are loaded at startup than may be loaded at a time."""
        n_starting = sum(model.load_on_startup for model in self.models)
        if most is not None and n_starting > most:
            raise SettingsError(
                f"{n_starting} models have load-on-startup, and {most} may be loaded at a time; "
                "raise --models-max"
            )

    def _check_names(self) -> None:
        owners: dict[str, str] = {}
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in owners:
                    raise SettingsError(
                        f"{name!r} names two models ({owners[name]} and {model.name}); rename one"
                    )
                owners[name] = model.name

    @classmethod
    def of_one(cls, options: ModelOptions) -> ModelCatalog:
        """Return the catalog of a server of one model, which is loaded when the server starts."""
        name, *others = options.served_names
        model = ServedModel(name, options, tuple(others), load_on_startup=True)
        return cls((model,), name, any_name=True)

    @classmethod
    def of_several(cls, models: Sequence[ServedModel], default: str | None = None) -> ModelCatalog:
        """Return the catalog of a server whose requests select a model by name.

        `default`: the model for requests that name none; None: the only model, if there is just
        one.
        """
        only = models[0].name if len(models) == 1 else None
        return cls(tuple(models), default or only)


def models_in(directory: str) -> dict[str, Path]:
    """Return the paths of the model files in a directory by name; raises SettingsError if it cannot
    be listed, has none, or has two of the same name.

    The name is the file name without `.gguf`. A split model has one name, and the path of its first
    part. A file in a folder of its own has the folder's name, or FOLDER/FILE if the folder has
    several. Files of image projectors (mmproj) are not models.
    """
    folder = Path(directory)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise SettingsError(
            f"{directory}: the models cannot be listed ({error.strerror}); give a directory with "
            "GGUF files (--models-dir)"
        ) from None
    found: dict[str, Path] = {}
    for name, path in _models_of(entries):
        if name in found:
            raise SettingsError(
                f"{directory}: two models are called {name} ({found[name].name} and {path.name}); "
                "rename one"
            )
        found[name] = path
    if not found:
        raise SettingsError(
            f"{directory}: it contains no GGUF file of a model; put one there (--models-dir)"
        )
    return found


def _models_of(entries: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the models among the entries of a directory, and of those in folders
    among the entries.
    """
    yield from _files_of(entries)
    for folder in entries:
        if not folder.is_dir():
            continue
        try:
            within = list(_files_of(sorted(folder.iterdir())))
        except OSError:  # Only root can read lost+found, for example.
            continue
        for name, path in within:
            yield folder.name if len(within) == 1 else f"{folder.name}/{name}", path


def _files_of(entries: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file of a model among the entries of a directory."""
    for path in entries:
        if path.suffix != ".gguf" or _PROJECTOR in path.name.lower() or not path.is_file():
            continue
        split = SplitName.of(path.stem)
        if split.number == 1:
            yield split.common, path


def projector_beside(model: Path, directory: str) -> Path | None:
    """Return the image projector in a model's own folder below a directory, if it is the only one.

    In the directory itself, nothing tells which model a projector belongs to.
    """
    if model.parent == Path(directory):
        return None
    found = [each for each in model.parent.glob("*.gguf") if _PROJECTOR in each.name.lower()]
    return found[0] if len(found) == 1 else None


def name_of(path: str) -> str:
    """Return the name of a model's file, without folder and suffix; all parts of a split model have
    the same one.
    """
    return SplitName.of(Path(path).name.removesuffix(".gguf")).common


def model_folder(name: str) -> str:
    """Return the name of the folder in which a server of several models keeps files of one."""
    quoted = quote(name, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
