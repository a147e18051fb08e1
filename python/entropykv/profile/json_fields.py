"""Read the JSON of an entropy profile; errors name the file, `where`, and the field.

schemas/entropy_profile.schema.json describes version 2 for other programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from entropykv.errors import ProfileError

FORMAT_VERSION = 2
HEAD_TYPE_LIMITS = {"sink": 0.5, "focused": 1.5, "moderate": 3.0, "mixed": 4.0}
"""The upper limit in bits (exclusive) of every type of head but the last one, "diffuse"."""

HEAD_TYPES = (*HEAD_TYPE_LIMITS, "diffuse")
STATISTICS = ("mean", "std", "min", "max", "cv")
GEOMETRY = ("n_layer", "n_head", "n_head_kv", "n_ctx")
REQUIRED = (*GEOMETRY, "head_entropies")
DERIVED = ("entropy_stats", "head_types", "layer_entropies")
"""Keys that are written for human readers, and ignored when a profile is read, because they are
derived.
"""
PARTS = ("fingerprint", "measurement", "curves", "predictor", "comparison")
KNOWN = {"format_version", "model", "source", *REQUIRED, *DERIVED, *PARTS}
MAX_ENTROPY_BITS = 64.0  # No context has 2^64 positions.
ADVICE = "calibrate again or use the profile of this model"

_DECIMALS = 6

FloatArray = npt.NDArray[np.float64]


def head_key(layer: int, head: int) -> str:
    """Return the key of a query head in the file."""
    return f"L{layer}_H{head}"


def is_number(value: object) -> bool:
    """Tell whether a value is a number in JSON, which excludes booleans."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_keys(data: Mapping[str, Any], where: str) -> int:
    """Check the version, the required keys and, in version 2, unknown keys and types of derived
    values.

    Returns the version; raises ProfileError for any that is wrong.
    """
    version = data.get("format_version", 1)
    if type(version) is not int or version not in (1, FORMAT_VERSION):
        raise ProfileError(
            f"{where}: format_version {shown(version)} is not 1 or 2; update entropykv or {ADVICE}"
        )
    for key in REQUIRED:
        if key not in data:
            raise ProfileError(f"{where}: lacks {key}; {ADVICE}")
    if version == FORMAT_VERSION:
        for key in data:
            if key not in KNOWN:
                raise ProfileError(f"{where}: unknown key {shown(key)}; remove it or {ADVICE}")
        _check_derived(data, "entropy_stats", STATISTICS, where)
        _check_derived(data, "head_types", HEAD_TYPES, where)
        layers = data.get("layer_entropies", [])
        if not isinstance(layers, list) or not all(map(is_number, layers)):
            raise ProfileError(
                f"{where}: layer_entropies must be a list of numbers; remove it or {ADVICE}"
            )
    return int(version)


def _check_derived(data: Mapping[str, Any], field: str, names: tuple[str, ...], where: str) -> None:
    """Raise ProfileError if data[field] exists and is no object of numbers under `names`."""
    numbers = data.get(field, {})
    if not isinstance(numbers, dict):
        raise ProfileError(f"{where}: {field} must be an object; remove it or {ADVICE}")
    for name, value in numbers.items():
        if name not in names or not is_number(value):
            raise ProfileError(
                f"{where}: {field} holds {shown(name)}: {shown(value)}, "
                f"which is not a known number; remove it or {ADVICE}"
            )


def check_geometry_values(data: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return n_layer, n_head, n_head_kv and n_ctx as positive integers that are consistent with
    each other; raises ProfileError for other values.
    """
    for name in GEOMETRY:
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProfileError(
                f"{where}: {name} must be a positive integer, not {shown(value)}; {ADVICE}"
            )
    n_head, n_head_kv = data["n_head"], data["n_head_kv"]
    if n_head % n_head_kv != 0:
        raise ProfileError(
            f"{where}: n_head {shown(n_head)} is not a multiple of n_head_kv "
            f"{shown(n_head_kv)}; {ADVICE}"
        )
    return {name: data[name] for name in GEOMETRY}


def read_entropies(table: object, geometry: Mapping[str, int], where: str) -> FloatArray:
    """Turn {"L0_H0": bits} into an array of shape (n_layer, n_head); raises ProfileError for
    another type, a query head that is missing or extra, and an impossible number.
    """
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: head_entropies must be an object; {ADVICE}")
    n_layer, n_head = geometry["n_layer"], geometry["n_head"]
    values: list[float] = []
    keys: set[str] = set()
    # The first missing head raises, so that a huge n_layer costs no time.
    for layer in range(n_layer):
        for head in range(n_head):
            key = head_key(layer, head)
            if key not in table:
                raise ProfileError(f"{where}: head_entropies lacks {key}; {ADVICE}")
            keys.add(key)
            values.append(_read_entropy(table[key], key, where))
    if len(table) != len(keys):
        extra = next(key for key in table if key not in keys)
        raise ProfileError(
            f"{where}: head_entropies holds {shown(extra)}, which is none of the "
            f"{n_layer} x {n_head} query heads; {ADVICE}"
        )
    return np.array(values, dtype=np.float64).reshape(n_layer, n_head)


def _read_entropy(value: object, key: str, where: str) -> float:
    if is_number(value):
        number = cast("float", value)
        if 0.0 <= number <= MAX_ENTROPY_BITS:  # This is false for NaN, too.
            return float(number)
    raise ProfileError(
        f"{where}: head_entropies {key} must be a number of bits between 0 and "
        f"{MAX_ENTROPY_BITS:g}, not {shown(value)}; {ADVICE}"
    )


def shown(value: object) -> str:
    """Return the value as short JSON-like text, for an error message."""
    try:
        text = repr(value)
    except ValueError:  # An integer can have more digits than Python converts.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:37] + "..."


def object_in(value: object, where: str, field: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return an object with exactly these keys; raises ProfileError for any other value."""
    if not isinstance(value, dict):
        raise ProfileError(f"{where}: {field} must be an object; {ADVICE}")
    for name in names:
        if name not in value:
            raise ProfileError(f"{where}: {field} lacks {name}; {ADVICE}")
    for key in value:
        if key not in names:
            raise ProfileError(
                f"{where}: {field} has the unknown key {shown(key)}; remove it or {ADVICE}"
            )
    return value


def text_in(value: object, where: str, field: str) -> str:
    """Return a text; raises ProfileError for any other value."""
    if not isinstance(value, str):
        raise ProfileError(f"{where}: {field} must be a text, not {shown(value)}; {ADVICE}")
    return value


def number_in(value: object, where: str, field: str, low: float, high: float) -> float:
    """Return a number from low to high; raises ProfileError for any other value, and for NaN."""
    if is_number(value) and low <= cast("float", value) <= high:
        return float(cast("float", value))
    raise ProfileError(
        f"{where}: {field} must be a number from {low:g} to {high:g}, not {shown(value)}; {ADVICE}"
    )


def integer_in(value: object, where: str, field: str, low: int, high: int) -> int:
    """Return an integer from low to high; raises ProfileError for any other value."""
    if type(value) is int and low <= value <= high:
        return value
    raise ProfileError(
        f"{where}: {field} must be an integer from {low} to {high}, not {shown(value)}; {ADVICE}"
    )


def table_in(
    value: object, where: str, field: str, shape: tuple[int, ...], high: float
) -> FloatArray:
    """Read nested lists of numbers from 0 to high as an array of the given shape.

    Raises ProfileError for any other value.
    """
    if not shape:
        return np.array(number_in(value, where, field, 0.0, high))
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ProfileError(f"{where}: {field} must be a list of {shape[0]}; {ADVICE}")
    parts = [
        table_in(item, where, f"{field}[{i}]", shape[1:], high) for i, item in enumerate(value)
    ]
    return np.array(parts, dtype=np.float64)


def rounded(values: FloatArray) -> Any:
    """Return nested lists rounded to six decimals, which is more than two calibrations agree on."""
    return np.round(values, _DECIMALS).tolist()


def to_text(data: Mapping[str, Any]) -> str:
    """Return the JSON text of a profile, indented by two spaces, with each list of numbers on one
    line.
    """
    text = json.dumps(data, indent=2, allow_nan=False)

    def on_one_line(match: re.Match[str]) -> str:
        return "[" + " ".join(match[1].split()) + "]"

    return re.sub(r"\[(\n[\s\d.,eE+-]+)\]", on_one_line, text) + "\n"
