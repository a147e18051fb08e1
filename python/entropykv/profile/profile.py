"""Define the entropy profile: the attention entropy of every query head, and its JSON file.

Version 1 is the file format of README_ENTROPY_KV; version 2 is the format that entropykv writes.
Both can be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from entropykv.errors import ProfileError
from entropykv.files import NotRegularError, new_file, open_regular
from entropykv.profile.curves import LossCurves
from entropykv.profile.json_fields import (
    ADVICE,
    FORMAT_VERSION,
    GEOMETRY,
    HEAD_TYPE_LIMITS,
    HEAD_TYPES,
    MAX_ENTROPY_BITS,
    STATISTICS,
    FloatArray,
    check_geometry_values,
    check_keys,
    head_key,
    read_entropies,
    to_text,
)
from entropykv.profile.parts import (
    Fingerprint,
    Measurement,
    curves_from_json,
    curves_to_json,
)
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.ways import WayComparison


@dataclass(frozen=True, eq=False)
class EntropyProfile:
    """Hold the mean attention entropy of every query head of one model.

    `n_layer`: the number of attention layers. `n_head`, `n_head_kv`: query heads and KV heads per
    layer. `head_entropies` has shape (n_layer, n_head), in bits, float64, read-only. `n_ctx` is the
    context length in tokens that the profile was made for. `model` and `source` are free text.
    `entropykv calibrate` adds `fingerprint`, `measurement`, `curves`, `predictor` and `comparison`.
    Raises ProfileError if a field has an impossible value.
    """

    n_layer: int
    n_head: int
    n_head_kv: int
    n_ctx: int
    head_entropies: FloatArray
    model: str = ""
    source: str = ""
    fingerprint: Fingerprint | None = None
    measurement: Measurement | None = None
    curves: LossCurves | None = None
    predictor: ScorePredictor | None = None
    comparison: WayComparison | None = None

    def __post_init__(self) -> None:
        """Check every field, and make a read-only copy of the entropies; raises ProfileError."""
        check_geometry_values({name: getattr(self, name) for name in GEOMETRY}, "profile")
        entropies = np.array(self.head_entropies, dtype=np.float64)
        expected = (self.n_layer, self.n_head)
        if entropies.shape != expected:
            raise ProfileError(
                f"profile: head_entropies has shape {entropies.shape}; give shape {expected}"
            )
        if not np.all((entropies >= 0.0) & (entropies <= MAX_ENTROPY_BITS)):
            raise ProfileError(
                "profile: head_entropies must lie between 0 and "
                f"{MAX_ENTROPY_BITS:g} bits; calibrate again"
            )
        entropies.flags.writeable = False
        object.__setattr__(self, "head_entropies", entropies)
        layers_and_heads = (self.n_layer, self.n_head_kv)
        if self.curves is not None and self.curves.mass_lost.shape[:2] != layers_and_heads:
            raise ProfileError(
                f"profile: curves are not of {self.n_layer} layers and {self.n_head_kv} KV heads; "
                "calibrate again"
            )
        if self.comparison is not None and self.comparison.uses_curves and self.curves is None:
            raise ProfileError(
                f"profile: comparison.best is {self.comparison.best}, which needs curves; "
                "calibrate again"
            )
        if self.predictor is not None and self.predictor.shape != (self.n_head_kv,) * self.n_layer:
            raise ProfileError(
                f"profile: predictor is not of {self.n_layer} layers and {self.n_head_kv} KV "
                "heads; calibrate again"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EntropyProfile:
        """Read a profile file of version 1 or 2; ProfileError names the file and the field."""
        path = Path(path)
        try:
            with open_regular(path) as file:
                text = file.read().decode("utf-8")
        except FileNotFoundError:
            raise ProfileError(
                f"{path}: no such file; make a profile with `entropykv calibrate`"
            ) from None
        except UnicodeDecodeError as error:
            raise ProfileError(f"{path}: is not UTF-8 text; {ADVICE}") from error
        except NotRegularError as error:
            raise ProfileError(
                f"{path}: {error.strerror}; give the path of a profile file"
            ) from None
        except (OSError, ValueError) as error:
            raise ProfileError(
                f"{path}: cannot be read ({error}); give the path of a profile file"
            ) from error
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(
                f"{path}: is not JSON or is truncated ({error}); {ADVICE}"
            ) from error
        return cls.from_dict(data, path.name)

    @classmethod
    def from_dict(cls, data: object, where: str) -> EntropyProfile:
        """Build a profile from parsed JSON; `where` names its origin in messages.

        Raises ProfileError for a wrong format_version, a missing or unknown key, a missing or
        extra query head, an impossible entropy or an impossible geometry.
        """
        if not isinstance(data, dict):
            raise ProfileError(f"{where}: must hold a JSON object; {ADVICE}")
        version = check_keys(data, where)
        geometry = check_geometry_values(data, where)
        entropies = read_entropies(data["head_entropies"], geometry, where)
        texts = [data.get(key, "") for key in ("model", "source")]
        if version == FORMAT_VERSION and not all(isinstance(text, str) for text in texts):
            raise ProfileError(f"{where}: model and source must be texts; {ADVICE}")
        model, source = (text if isinstance(text, str) else "" for text in texts)
        n_layer, n_head, n_head_kv, n_ctx = geometry.values()
        parts = _read_parts(data, where, geometry) if version == FORMAT_VERSION else {}
        return cls(n_layer, n_head, n_head_kv, n_ctx, entropies, model, source, **parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a version 2 file; statistics and types are included for human
        readers.
        """
        entropies = self.head_entropies
        numbers = (self.mean, entropies.std(), entropies.min(), entropies.max())
        statistics = [*map(float, numbers), self.coefficient_of_variation]
        parts: dict[str, Any] = {}
        if self.fingerprint is not None:
            parts["fingerprint"] = self.fingerprint.to_json()
        if self.measurement is not None:
            parts["measurement"] = self.measurement.to_json()
        if self.curves is not None:
            parts["curves"] = curves_to_json(self.curves)
        if self.predictor is not None:
            parts["predictor"] = self.predictor.to_json()
        if self.comparison is not None:
            parts["comparison"] = self.comparison.to_json()
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "source": self.source,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_head_kv": self.n_head_kv,
            "n_ctx": self.n_ctx,
            "entropy_stats": dict(zip(STATISTICS, statistics, strict=True)),
            "head_types": self.head_types(),
            "layer_entropies": self.layer_means().tolist(),
            "head_entropies": {
                head_key(layer, head): float(value)
                for (layer, head), value in np.ndenumerate(entropies)
            },
            **parts,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a version 2 file; it is renamed into place, so that a crash leaves no partial file.

        Raises ProfileError if it cannot be written.
        """
        text = to_text(self.to_dict())
        try:
            with new_file(path) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ProfileError(
                f"{path}: cannot be written ({error.strerror}); give a writable path"
            ) from error

    @property
    def mean(self) -> float:
        """Return the mean entropy of all query heads, in bits."""
        return float(self.head_entropies.mean())

    @property
    def coefficient_of_variation(self) -> float:
        """Return the standard deviation divided by the mean over all query heads; 0 if the mean is
        0.
        """
        mean = self.mean
        return float(self.head_entropies.std()) / mean if mean > 0.0 else 0.0

    def head_types(self) -> dict[str, int]:
        """Return how many query heads are of each type, by the names of HEAD_TYPES."""
        counts = np.bincount(self.kinds().ravel(), minlength=len(HEAD_TYPES))
        return {name: int(count) for name, count in zip(HEAD_TYPES, counts, strict=True)}

    def kinds(self) -> npt.NDArray[np.intp]:
        """Return the type of every query head, (n_layer, n_head), as an index into HEAD_TYPES."""
        return np.digitize(self.head_entropies, list(HEAD_TYPE_LIMITS.values()))

    def kv_head_entropies(self) -> FloatArray:
        """Return the entropy of each KV head, (n_layer, n_head_kv): the maximum of its group."""
        groups = self.head_entropies.reshape(self.n_layer, self.n_head_kv, -1)
        return cast("FloatArray", groups.max(axis=2))

    def layer_means(self) -> FloatArray:
        """Return the mean entropy of each layer's query heads, (n_layer,), in bits."""
        return cast("FloatArray", self.head_entropies.mean(axis=1))

    def check_geometry(self, n_layer: int, n_head: int, n_head_kv: int, model_name: str) -> None:
        """Raise ProfileError unless the profile fits a model of this geometry."""
        mine = (self.n_layer, self.n_head, self.n_head_kv)
        theirs = (n_layer, n_head, n_head_kv)
        if mine != theirs:
            owner = f"the profile of {self.model}" if self.model else "the profile"
            raise ProfileError(
                f"{owner} has {_geometry_text(mine)}, but {model_name} has "
                f"{_geometry_text(theirs)}; {ADVICE}"
            )


def _read_parts(data: dict[str, Any], where: str, geometry: Mapping[str, int]) -> dict[str, Any]:
    """Read those optional objects of version 2 that the file has."""
    n_layer, n_head, n_head_kv, _ = geometry.values()
    parts: dict[str, Any] = {}
    if "fingerprint" in data:
        parts["fingerprint"] = Fingerprint.from_json(data["fingerprint"], where)
    if "measurement" in data:
        parts["measurement"] = Measurement.from_json(data["measurement"], where, (n_layer, n_head))
    if "curves" in data:
        parts["curves"] = curves_from_json(data["curves"], where, (n_layer, n_head_kv))
    if "predictor" in data:
        shape = (n_layer, n_head_kv)
        parts["predictor"] = ScorePredictor.from_json(data["predictor"], where, shape)
    if "comparison" in data:
        parts["comparison"] = WayComparison.from_json(data["comparison"], where)
    return parts


def _geometry_text(geometry: tuple[int, int, int]) -> str:
    return "{} layers, {} query heads and {} KV heads".format(*geometry)
