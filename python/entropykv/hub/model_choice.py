"""Choose a model among the files of a repository, by their names only; nothing is read or
fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from entropykv.errors import HubError
from entropykv.hub.listing import HubFile, Listing
from entropykv.model.identity import SplitName

CONVERTED = ".entropykv.gguf"
"""The ending of files that entropykv has converted; only caches contain them, not repositories."""
PREFERRED = ("Q4_K_M", "Q8_0")
"""The quantisations that are preferred if none is requested, as in llama.cpp; without one of them,
the first model is taken.
"""
_BESIDE_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""What names of GGUF files contain that belong to a model but are not models: llama.cpp's list."""
_REFERENCE = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,64}))?")
_QUANT = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_MOST_NAMED = 12
_HOW = (
    "give it as USER/MODEL or USER/MODEL:QUANT, such as bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0"
)


@dataclass(frozen=True)
class Reference:
    """Name a repository and, after a colon, the requested quantisation."""

    repo: str
    quant: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read user/model or user/model:quant; raises HubError for any other text."""
        found = _REFERENCE.fullmatch(text)
        if found is None or not cls.is_one(text):
            raise HubError(f"{text[:120]!r} is not the name of a model of the hub; {_HOW}")
        return cls(found[1], found[2])

    @staticmethod
    def is_one(text: str) -> bool:
        """Tell whether a text is user/model or user/model:quant."""
        return _REFERENCE.fullmatch(text) is not None and ".." not in text


def _split_of(file: HubFile) -> SplitName:
    return SplitName.of(file.path.removesuffix(".gguf"))


def models_of(files: Iterable[HubFile]) -> list[HubFile]:
    """Return the GGUF files that are models; of a split model, its first part."""
    return [
        file
        for file in files
        if file.path.endswith(".gguf")
        and not file.path.endswith(CONVERTED)
        and not any(word in file.name for word in _BESIDE_MODELS)
        and _split_of(file).number == 1
    ]


def choose_model(listing: Listing, quant: str | None, pattern: str | None) -> HubFile:
    """Return the requested model; of a split model, its first part.

    `quant`: the quantisation after the colon, which stands before a dot or dash in the file's path.
    `pattern`: a file's path, or a pattern that matches one model, such as *q8_0.gguf. Without both,
    the first available of PREFERRED is returned, or else the first model. Raises HubError, which
    lists the available models, if none or several match.
    """
    models = models_of(listing.files)
    if not models:
        raise HubError(f"{listing.repo} has no GGUF file of a model; {_advice(listing)}")
    if pattern is not None:
        return _fitting(listing, models, pattern)
    for wanted in PREFERRED if quant is None else (quant,):
        ends = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        found = next((model for model in models if ends.search(model.path)), None)
        if found is not None:
            return found
    if quant is None:
        return models[0]
    raise HubError(
        f"{listing.repo} has no GGUF file of quantisation {quant}; it has {_quants(models)}"
    )


def _fitting(listing: Listing, models: Sequence[HubFile], pattern: str) -> HubFile:
    """Return the one model that matches a name or pattern; a part of a split model matches for all
    parts.
    """
    paths = {file.path: file for file in models}
    wanted = pattern.lower()
    named = [file for file in listing.files if fnmatchcase(file.path.lower(), wanted)]
    named = [file for file in named if file.path.endswith(".gguf")]
    found = {first for file in named if (first := _first_part(file)) in paths}
    if not found and len(named) == 1 and _split_of(named[0]).count == 1:
        raise HubError(
            f"{listing.repo}: {named[0].path} belongs to a model and is none; it has "
            f"{_named(paths)}"
        )
    if len(found) != 1:
        what = "no GGUF file" if not found else f"{len(found)} models"
        raise HubError(
            f"{listing.repo} has {what} of the name {pattern!r}; it has "
            f"{_named(sorted(found) or list(paths))}"
        )
    return paths[found.pop()]


def _first_part(file: HubFile) -> str:
    split = _split_of(file)
    if split.count == 1:
        return file.path
    digits = file.path[len(split.common) :]
    return f"{split.common}{digits[0]}00001{digits[6:]}"


def parts_of(listing: Listing, first: HubFile) -> list[HubFile]:
    """Return all parts of a model in order; raises HubError if one is missing."""
    split = _split_of(first)
    if split.count == 1:
        return [first]
    there = {
        other.number: file
        for file in listing.files
        if file.path.endswith(".gguf")
        and (other := _split_of(file)).common == split.common
        and other.count == split.count
    }
    missing = next((n for n in range(1, split.count + 1) if n not in there), None)
    if missing is not None:
        raise HubError(
            f"{listing.repo}: part {missing} of {split.count} of {first.path} is not there; choose "
            f"another one of {_quants(models_of(listing.files))}"
        )
    return [there[number] for number in range(1, split.count + 1)]


def quant_of(model: HubFile) -> str | None:
    """Return the quantisation in a file's name, in capitals; None if the name has none.

    It is what follows the last dash or dot before .gguf, without the number of a split file.
    """
    found = _QUANT.search(_split_of(model).common)
    return None if found is None else found[1].upper()


def _quants(models: Sequence[HubFile]) -> str:
    """List the available quantisations, or the files if their names do not tell."""
    quants = [quant_of(model) for model in models]
    named = [quant for quant in quants if quant is not None]
    return _named(dict.fromkeys(named if len(named) == len(models) else [m.path for m in models]))


def _named(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _advice(listing: Listing) -> str:
    """Say what to do about a repository without a model that can be loaded."""
    if any(file.path.endswith(".safetensors") for file in listing.files):
        return (
            "it has weights for transformers: look for a repository of the same model whose name "
            "ends with -GGUF"
        )
    return "give a repository that has one: their names often end with -GGUF"
