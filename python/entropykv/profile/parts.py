"""Define the fingerprint and the measurement of a version 2 profile, and read and write them and
the loss curves as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entropykv.errors import ProfileError
from entropykv.profile.curves import EARLIER_IMPORTANCES, IMPORTANCES, MOST_DAMAGE, LossCurves
from entropykv.profile.json_fields import (
    ADVICE,
    MAX_ENTROPY_BITS,
    FloatArray,
    integer_in,
    number_in,
    object_in,
    rounded,
    shown,
    table_in,
    text_in,
)

ROWS = ("quarters", "all")
"""The attention rows that a head's entropy is averaged over: those at 25, 50, 75 and 100 % of every
text (README_ENTROPY_KV), or all rows of every text.
"""

_OPTIONAL = ("layer_damage", "importance")
"""The fields of LossCurves that files of earlier versions do not have."""
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Fingerprint:
    """Identify the model that a profile was made with, by its GGUF file.

    `header_sha256` is the hash of all bytes before the tensor data: metadata and tensor infos.
    Another quantisation of the same model has another header, but the same `norms_sha256` (see
    norms_of() in model/identity.py). This is None if the norms do not identify the model, and in
    files of earlier versions.
    """

    architecture: str
    n_vocab: int
    head_dim_k: int
    head_dim_v: int
    header_sha256: str
    norms_sha256: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the fingerprint."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def is_of_file(self, other: Fingerprint) -> bool:
        """Tell whether this fingerprint and `other` belong to the same file: equal headers, and
        norms that do not differ.
        """
        norms = {self.norms_sha256, other.norms_sha256} - {None}
        return self.header_sha256 == other.header_sha256 and len(norms) < 2

    def is_of_weights(self, other: Fingerprint) -> bool:
        """Tell whether this fingerprint and `other` belong to the same weights, in any
        quantisation.
        """
        ours, theirs = (
            (of.architecture, of.n_vocab, of.head_dim_k, of.head_dim_v, of.norms_sha256)
            for of in (self, other)
        )
        return self.is_of_file(other) or (self.norms_sha256 is not None and ours == theirs)

    @classmethod
    def from_json(cls, value: object, where: str) -> Fingerprint:
        """Read the JSON object of a fingerprint; ProfileError names the field."""
        names = [name for name in cls.__dataclass_fields__ if name != "norms_sha256"]
        if isinstance(value, dict) and "norms_sha256" in value:
            names.append("norms_sha256")
        data = object_in(value, where, "fingerprint", tuple(names))
        sizes = {
            name: integer_in(data[name], where, f"fingerprint.{name}", 0, _MOST)
            for name in ("n_vocab", "head_dim_k", "head_dim_v")
        }
        header, norms = (
            _digest_in(data[name], where, f"fingerprint.{name}") if name in data else None
            for name in ("header_sha256", "norms_sha256")
        )
        architecture = text_in(data["architecture"], where, "fingerprint.architecture")
        return cls(
            architecture=architecture, header_sha256=str(header), norms_sha256=norms, **sizes
        )


def _digest_in(value: object, where: str, field: str) -> str:
    digest = text_in(value, where, field)
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ProfileError(
            f"{where}: {field} must be 64 hexadecimal digits, not {shown(digest)}; {ADVICE}"
        )
    return digest


@dataclass(frozen=True, eq=False)
class Measurement:
    """Hold how the entropies were measured, and further statistics of the measurement.

    Entropies are in bits, (n_layer, n_head): `quarters` and `all_rows` are means over the texts of
    the two kinds of ROWS; `rows` names the kind that the profile uses, and `spread` is the standard
    deviation of that kind over the texts. `stability` is Pearson's correlation between the
    entropies of two disjoint halves of the texts; None if there is only one text. `texts` are
    (name, tokens read). `kv_type` is the type in which K and V were stored.
    """

    engine: str
    rows: str
    max_length: int
    seed: int
    kv_type: str
    texts: tuple[tuple[str, int], ...]
    stability: float | None
    quarters: FloatArray
    all_rows: FloatArray
    spread: FloatArray

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the measurement."""
        data = dict(vars(self))
        data["texts"] = [{"name": name, "tokens": tokens} for name, tokens in self.texts]
        for name in ("quarters", "all_rows", "spread"):
            data[name] = rounded(data[name])
        return data

    @classmethod
    def from_json(cls, value: object, where: str, shape: tuple[int, int]) -> Measurement:
        """Read the JSON object, where `shape` is (n_layer, n_head); ProfileError names a field."""
        data = object_in(value, where, "measurement", tuple(cls.__dataclass_fields__))
        tables = {
            name: table_in(data[name], where, f"measurement.{name}", shape, MAX_ENTROPY_BITS)
            for name in ("quarters", "all_rows", "spread")
        }
        rows = text_in(data["rows"], where, "measurement.rows")
        if rows not in ROWS:
            raise ProfileError(
                f"{where}: measurement.rows must be one of {', '.join(ROWS)}, not {shown(rows)}; "
                f"{ADVICE}"
            )
        stability = data["stability"]
        if stability is not None:
            stability = number_in(stability, where, "measurement.stability", -1.0, 1.0)
        return cls(
            engine=text_in(data["engine"], where, "measurement.engine"),
            rows=rows,
            max_length=integer_in(data["max_length"], where, "measurement.max_length", 1, _MOST),
            seed=integer_in(data["seed"], where, "measurement.seed", 0, _MOST),
            kv_type=text_in(data["kv_type"], where, "measurement.kv_type"),
            texts=_texts(data["texts"], where),
            stability=stability,
            **tables,
        )


def _texts(value: object, where: str) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, list):
        raise ProfileError(f"{where}: measurement.texts must be a list; {ADVICE}")
    texts = []
    for i, item in enumerate(value):
        field = f"measurement.texts[{i}]"
        data = object_in(item, where, field, ("name", "tokens"))
        texts.append(
            (
                text_in(data["name"], where, f"{field}.name"),
                integer_in(data["tokens"], where, f"{field}.tokens", 1, _MOST),
            )
        )
    return tuple(texts)


def curves_to_json(curves: LossCurves) -> dict[str, Any]:
    """Return the JSON object of the loss curves."""
    data = dict(vars(curves))
    data["keep"] = list(curves.keep)
    for name in ("mass_lost", "output_error"):
        data[name] = rounded(data[name])
    if curves.layer_damage is not None:
        data["layer_damage"] = rounded(curves.layer_damage)
    return {name: value for name, value in data.items() if value is not None}


def curves_from_json(value: object, where: str, shape: tuple[int, int]) -> LossCurves:
    """Read the curves, where `shape` is (n_layer, n_head_kv); ProfileError names a field."""
    present = value if isinstance(value, dict) else {}
    optional = [name for name in _OPTIONAL if name in present]
    required = (name for name in LossCurves.__dataclass_fields__ if name not in _OPTIONAL)
    data = object_in(value, where, "curves", (*required, *optional))
    least = {"length": 1, "queries": 1, "n_sinks": 0, "recent_window": 1, "n_texts": 1}
    numbers = {
        name: integer_in(data[name], where, f"curves.{name}", low, _MOST)
        for name, low in least.items()
    }
    keep = data["keep"]
    if not isinstance(keep, list) or not keep:
        raise ProfileError(f"{where}: curves.keep must be a list of numbers; {ADVICE}")
    kept = [
        integer_in(k, where, f"curves.keep[{i}]", 0, numbers["length"]) for i, k in enumerate(keep)
    ]
    if kept[0] != 0 or kept != sorted(set(kept)):
        raise ProfileError(f"{where}: curves.keep must ascend from 0; {ADVICE}")
    tables = {
        name: table_in(data[name], where, f"curves.{name}", (*shape, len(kept)), most)
        for name, most in (("mass_lost", 1.0), ("output_error", 1e4))
    }
    damage = importance = None
    if "layer_damage" in optional:
        field = "curves.layer_damage"
        damage = table_in(data["layer_damage"], where, field, shape[:1], MOST_DAMAGE)
    if "importance" in optional:
        importance = text_in(data["importance"], where, "curves.importance")
        importance = EARLIER_IMPORTANCES.get(importance, importance)
        if importance not in IMPORTANCES:
            raise ProfileError(
                f"{where}: curves.importance must be one of {', '.join(IMPORTANCES)}, not "
                f"{shown(importance)}; {ADVICE}"
            )
    return LossCurves(
        keep=tuple(kept),
        mass_lost=tables["mass_lost"],
        output_error=tables["output_error"],
        layer_damage=damage,
        importance=importance,
        **numbers,
    )
