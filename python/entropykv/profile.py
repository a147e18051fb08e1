"""EntropyProfile: the calibrated attention entropy of every query head, and its JSON file.

Version 1 is the file of the BitNet document; version 2 is written here. Both are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from entropykv.errors import ProfileError

FORMAT_VERSION = 2
HEAD_TYPE_LIMITS = {"sink": 0.5, "focused": 1.5, "moderate": 3.0, "mixed": 4.0}
"""Upper limit in bits (exclusive) of every type but the last, which is "diffuse"."""

_HEAD_TYPES = (*HEAD_TYPE_LIMITS, "diffuse")
_STATISTICS = ("mean", "std", "min", "max", "cv")
_GEOMETRY = ("n_layer", "n_head", "n_head_kv", "n_ctx")
_REQUIRED = (*_GEOMETRY, "head_entropies")
_KNOWN = {"format_version", "model", "source", *_REQUIRED, "entropy_stats", "head_types"}
_MAX_ENTROPY_BITS = 64.0  # log2 of more positions than any context has
_ADVICE = "calibrate again or use the profile of this model"

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EntropyProfile:
    """Mean attention entropy of every query head of one model.

    `head_entropies` has shape (n_layer, n_head), in bits, float64, read-only. `n_ctx` is the
    context the profile was made for, in tokens. `model` and `source` are free text.
    Raises ProfileError where a field has an impossible value.
    """

    n_layer: int
    n_head: int
    n_head_kv: int
    n_ctx: int
    head_entropies: FloatArray
    model: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Check every field and take a read-only copy of the entropies."""
        _check_geometry_values({name: getattr(self, name) for name in _GEOMETRY}, "profile")
        entropies = np.array(self.head_entropies, dtype=np.float64)
        expected = (self.n_layer, self.n_head)
        if entropies.shape != expected:
            raise ProfileError(
                f"profile: head_entropies has shape {entropies.shape}; give shape {expected}"
            )
        if not np.all((entropies >= 0.0) & (entropies <= _MAX_ENTROPY_BITS)):
            raise ProfileError(
                "profile: head_entropies must lie between 0 and "
                f"{_MAX_ENTROPY_BITS:g} bits; calibrate again"
            )
        entropies.flags.writeable = False
        object.__setattr__(self, "head_entropies", entropies)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EntropyProfile:
        """Read a profile file of version 1 or 2; ProfileError names the file and the field."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ProfileError(
                f"{path}: no such file; make a profile with `entropykv calibrate`"
            ) from None
        except UnicodeDecodeError as error:
            raise ProfileError(f"{path}: is not UTF-8 text; {_ADVICE}") from error
        except (OSError, ValueError) as error:
            raise ProfileError(
                f"{path}: cannot be read ({error}); give the path of a profile file"
            ) from error
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(
                f"{path}: is not JSON or is truncated ({error}); {_ADVICE}"
            ) from error
        return cls.from_dict(data, path.name)

    @classmethod
    def from_dict(cls, data: object, where: str) -> EntropyProfile:
        """Build a profile from parsed JSON; `where` names its origin in messages.

        Raises ProfileError for a wrong format_version, a missing or unknown key, a missing or
        extra query head, an impossible entropy or an impossible geometry.
        """
        if not isinstance(data, dict):
            raise ProfileError(f"{where}: must hold a JSON object; {_ADVICE}")
        version = _check_keys(data, where)
        geometry = _check_geometry_values(data, where)
        entropies = _read_entropies(data["head_entropies"], geometry, where)
        texts = [data.get(key, "") for key in ("model", "source")]
        if version == FORMAT_VERSION and not all(isinstance(text, str) for text in texts):
            raise ProfileError(f"{where}: model and source must be texts; {_ADVICE}")
        model, source = (text if isinstance(text, str) else "" for text in texts)
        n_layer, n_head, n_head_kv, n_ctx = geometry.values()
        return cls(n_layer, n_head, n_head_kv, n_ctx, entropies, model, source)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a version 2 file; statistics and types are derived, for readers."""
        entropies = self.head_entropies
        numbers = (self.mean, entropies.std(), entropies.min(), entropies.max())
        statistics = [*map(float, numbers), self.coefficient_of_variation]
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "source": self.source,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_head_kv": self.n_head_kv,
            "n_ctx": self.n_ctx,
            "entropy_stats": dict(zip(_STATISTICS, statistics, strict=True)),
            "head_types": self.head_types(),
            "head_entropies": {
                _head_key(layer, head): float(value)
                for (layer, head), value in np.ndenumerate(entropies)
            },
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a version 2 file; it is renamed into place, so a crash leaves no half file."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        try:
            with open(partial, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise ProfileError(
                f"{path}: cannot be written ({error.strerror}); give a writable path"
            ) from error

    @property
    def mean(self) -> float:
        """Mean entropy of all query heads, in bits."""
        return float(self.head_entropies.mean())

    @property
    def coefficient_of_variation(self) -> float:
        """Standard deviation over mean of all query heads; 0 where the mean is 0."""
        mean = self.mean
        return float(self.head_entropies.std()) / mean if mean > 0.0 else 0.0

    def head_types(self) -> dict[str, int]:
        """Count the query heads of every type, by HEAD_TYPE_LIMITS."""
        kinds = np.digitize(self.head_entropies.ravel(), list(HEAD_TYPE_LIMITS.values()))
        counts = np.bincount(kinds, minlength=len(_HEAD_TYPES))
        return {name: int(count) for name, count in zip(_HEAD_TYPES, counts, strict=True)}

    def kv_head_entropies(self) -> FloatArray:
        """Entropy of every KV head, shape (n_layer, n_head_kv): the maximum of its GQA group."""
        groups = self.head_entropies.reshape(self.n_layer, self.n_head_kv, -1)
        return cast("FloatArray", groups.max(axis=2))

    def layer_means(self) -> FloatArray:
        """Mean entropy of the query heads of every layer, shape (n_layer,), in bits."""
        return cast("FloatArray", self.head_entropies.mean(axis=1))

    def check_geometry(self, n_layer: int, n_head: int, n_head_kv: int, model_name: str) -> None:
        """Raise ProfileError unless the profile fits a model of this geometry."""
        mine = (self.n_layer, self.n_head, self.n_head_kv)
        theirs = (n_layer, n_head, n_head_kv)
        if mine != theirs:
            owner = f"the profile of {self.model}" if self.model else "the profile"
            raise ProfileError(
                f"{owner} has {_geometry_text(mine)}, but {model_name} has "
                f"{_geometry_text(theirs)}; {_ADVICE}"
            )


def _geometry_text(geometry: tuple[int, int, int]) -> str:
    return "{} layers, {} query heads and {} KV heads".format(*geometry)


def _head_key(layer: int, head: int) -> str:
    return f"L{layer}_H{head}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_keys(data: Mapping[str, Any], where: str) -> int:
    """Check version, required keys and, in version 2, unknown keys and types of derived ones."""
    version = data.get("format_version", 1)
    if type(version) is not int or version not in (1, FORMAT_VERSION):
        raise ProfileError(
            f"{where}: format_version {_shown(version)} is not 1 or 2; "
            f"update entropykv or {_ADVICE}"
        )
    for key in _REQUIRED:
        if key not in data:
            raise ProfileError(f"{where}: lacks {key}; {_ADVICE}")
    if version == FORMAT_VERSION:
        for key in data:
            if key not in _KNOWN:
                raise ProfileError(f"{where}: unknown key {_shown(key)}; remove it or {_ADVICE}")
        _check_derived(data, "entropy_stats", _STATISTICS, where)
        _check_derived(data, "head_types", _HEAD_TYPES, where)
    return int(version)


def _check_derived(data: Mapping[str, Any], field: str, names: tuple[str, ...], where: str) -> None:
    """Check that a derived object, where present, holds only numbers under known names."""
    numbers = data.get(field, {})
    if not isinstance(numbers, dict):
        raise ProfileError(f"{where}: {field} must be an object; remove it or {_ADVICE}")
    for name, value in numbers.items():
        if name not in names or not _is_number(value):
            raise ProfileError(
                f"{where}: {field} holds {_shown(name)}: {_shown(value)}, "
                f"which is not a known number; remove it or {_ADVICE}"
            )


def _check_geometry_values(data: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return n_layer, n_head, n_head_kv and n_ctx as positive integers that fit together."""
    for name in _GEOMETRY:
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProfileError(
                f"{where}: {name} must be a positive integer, not {_shown(value)}; {_ADVICE}"
            )
    n_head, n_head_kv = data["n_head"], data["n_head_kv"]
    if n_head % n_head_kv != 0:
        raise ProfileError(
            f"{where}: n_head {_shown(n_head)} is not a multiple of n_head_kv "
            f"{_shown(n_head_kv)}; {_ADVICE}"
        )
    return {name: data[name] for name in _GEOMETRY}


def _read_entropies(table: object, geometry: Mapping[str, int], where: str) -> FloatArray:
    """Turn {"L0_H0": bits} into an array of shape (n_layer, n_head)."""
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: head_entropies must be an object; {_ADVICE}")
    n_layer, n_head = geometry["n_layer"], geometry["n_head"]
    values: list[float] = []
    keys: set[str] = set()
    for layer in range(n_layer):  # stops at the first missing head, however large n_layer is
        for head in range(n_head):
            key = _head_key(layer, head)
            if key not in table:
                raise ProfileError(f"{where}: head_entropies lacks {key}; {_ADVICE}")
            keys.add(key)
            values.append(_read_entropy(table[key], key, where))
    if len(table) != len(keys):
        extra = next(key for key in table if key not in keys)
        raise ProfileError(
            f"{where}: head_entropies holds {_shown(extra)}, which is none of the "
            f"{n_layer} x {n_head} query heads; {_ADVICE}"
        )
    return np.array(values, dtype=np.float64).reshape(n_layer, n_head)


def _read_entropy(value: object, key: str, where: str) -> float:
    if _is_number(value):
        number = cast("float", value)
        if 0.0 <= number <= _MAX_ENTROPY_BITS:  # false for NaN too
            return float(number)
    raise ProfileError(
        f"{where}: head_entropies {key} must be a number of bits between 0 and "
        f"{_MAX_ENTROPY_BITS:g}, not {_shown(value)}; {_ADVICE}"
    )


def _shown(value: object) -> str:
    """Return the value as short JSON-like text for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."
