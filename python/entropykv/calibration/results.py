"""Read existing calibration results (`--from-results`): entropies in common shapes of JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from entropykv.errors import CalibrationError
from entropykv.profile.json_fields import MAX_ENTROPY_BITS, is_number, shown
from entropykv.profile.profile import EntropyProfile

_TABLES = ("head_entropies", "per_head_entropy", "entropies", "results")
_MEANS = ("mean_entropy", "entropy", "mean")
_KEY = re.compile(r"^L(?:ayer)?_?(\d+)_?H(?:ead)?_?(\d+)$", re.IGNORECASE)
_DEFAULT_CONTEXT = 2048
_WAY_OUT = 'give {"head_entropies": {"L0_H0": bits, ...}} or calibrate the model itself'


def read_results(path: str | os.PathLike[str]) -> EntropyProfile:
    """Make a profile from calibration results.

    A profile of version 1 or 2 is returned unchanged. Otherwise the entropies are under one of the
    keys `head_entropies`, `per_head_entropy`, `entropies` or `results`, or are the file itself: as
    {"L0_H0": x} or [layer][head], where x is a number of bits, a list of them over texts (which is
    averaged), or an object with `mean_entropy`, `entropy` or `mean`. Missing geometry is derived
    from the entropies, with one KV head per query head and a context of 2,048 tokens. Raises
    CalibrationError for a file that cannot be read as one of these, and ProfileError for an invalid
    field, which it names.
    """
    where = Path(path).name
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}; give a results file") from None
    except (ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{where}: is not JSON or is truncated ({error}); write it again"
        ) from None
    if isinstance(data, dict) and {"format_version", "n_layer", "head_entropies"} <= set(data):
        return EntropyProfile.from_dict(data, where)
    fields: Mapping[str, Any] = data if isinstance(data, dict) else {}
    table = next((fields[name] for name in _TABLES if name in fields), data)
    cells = _cells(table, where)
    n_layer = 1 + max(layer for layer, _ in cells)
    n_head = 1 + max(head for _, head in cells)
    profile = {
        "format_version": 1,
        "n_layer": fields.get("n_layer", n_layer),
        "n_head": fields.get("n_head", n_head),
        "n_head_kv": fields.get("n_head_kv", fields.get("n_head", n_head)),
        "n_ctx": fields.get("n_ctx", _DEFAULT_CONTEXT),
        "model": fields.get("model", ""),
        "source": f"calibration results {where}",
        "head_entropies": {f"L{layer}_H{head}": bits for (layer, head), bits in cells.items()},
    }
    return EntropyProfile.from_dict(profile, where)


def _cells(table: object, where: str) -> dict[tuple[int, int], float]:
    """Return the entropy in bits of each query head by (layer, head), or raise CalibrationError."""
    cells: dict[tuple[int, int], float] = {}
    if isinstance(table, dict):
        for key, value in table.items():
            match = _KEY.match(key)
            if match is None:
                raise CalibrationError(
                    f"{where}: {shown(key)} is not the name of a query head; {_WAY_OUT}"
                )
            cells[int(match[1]), int(match[2])] = _bits(value, f"{where}: {key}")
    elif isinstance(table, list) and all(isinstance(layer, list) for layer in table):
        for layer, heads in enumerate(table):
            for head, value in enumerate(heads):
                cells[layer, head] = _bits(value, f"{where}: entropies[{layer}][{head}]")
    if not cells:
        raise CalibrationError(f"{where}: holds no entropies; {_WAY_OUT}")
    return cells


def _bits(value: object, what: str) -> float:
    if isinstance(value, dict):
        value = next((value[name] for name in _MEANS if name in value), None)
    values: list[Any] = value if isinstance(value, list) and value else [value]
    for number in values:
        if not is_number(number) or not 0.0 <= number <= MAX_ENTROPY_BITS:
            raise CalibrationError(
                f"{what} must be a number of bits between 0 and {MAX_ENTROPY_BITS:g}, not "
                f"{shown(number)}; calibrate again"
            )
    return float(np.mean(values))
