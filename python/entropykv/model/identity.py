"""Identify the model in a file: its shape, its header, its norms, and a sample of its weights."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.model.geometry import ModelGeometry
from entropykv.model.header import HeaderReader, check_prefix, damage_named, read_header

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.IGNORECASE)
_BLOCKS, _BLOCK_BYTES = 64, 4096
_NORM = "norm.weight"
"""The ending of the names of norm weights."""


@dataclass(frozen=True)
class SplitName:
    """Hold the common name of the files of a split model, the number of one file, from 1, and their
    count. A model in one file is its own only part.
    """

    common: str
    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, stem: str) -> SplitName:
        """Read the name of a file without .gguf, with or without folders."""
        found = _SPLIT.fullmatch(stem)
        return cls(stem) if found is None else cls(found[1], int(found[2]), int(found[3]))

    @property
    def others(self) -> list[str]:
        """Return the names of the other files, without .gguf, if this is the first one."""
        numbers = range(2, self.count + 1) if self.number == 1 else ()
        return [f"{self.common}-{number:05}-of-{self.count:05}" for number in numbers]


def shape_of(geometry: ModelGeometry, header: bytes) -> dict[str, Any]:
    """Return architecture, n_vocab, head_dim_k, head_dim_v and header_sha256 of a model, by name.

    `header`: all bytes before the tensor data. Another quantisation of the same model has another
    header.
    """
    return {
        "architecture": geometry.architecture,
        "n_vocab": geometry.n_vocab,
        "head_dim_k": geometry.head_dim_k,
        "head_dim_v": geometry.head_dim_v,
        "header_sha256": hashlib.sha256(header).hexdigest(),
    }


def identity_of(geometry: ModelGeometry) -> dict[str, Any]:
    """Return shape_of() with a `weights_sample`, because two models may have equal headers.

    The sample is a hash of blocks that are spread evenly over the tensors. The file is read for it.
    Raises the errors of read_header().
    """
    header = read_header(geometry.path)
    digest = hashlib.blake2b(digest_size=16)
    with open(geometry.path, "rb") as file:
        room = max(geometry.file_bytes - len(header) - _BLOCK_BYTES, 0)
        for block in range(_BLOCKS):
            file.seek(len(header) + room * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return {**shape_of(geometry, header), "weights_sample": digest.hexdigest()}


def norms_of(path: Path) -> str | None:
    """Return a SHA-256 of the weights of all norms, which identifies a model in any quantisation.

    Quantisation keeps norms unchanged, in F32, so that files of every type have the same hash. A
    model that was trained further has another hash, unless only its projections were trained. Of a
    split model, `path` is the first part, and all parts are read. Returns None if norms cannot tell
    models apart: they have no weights, or all weights are equal, or a part is missing. Raises
    ModelFileError for a damaged part.
    """
    norms: dict[str, bytes] = {}
    for part in parts_of(path):
        if not part.is_file():
            return None
        check_prefix(part)
        with damage_named(part):
            reader = HeaderReader(part)
            for name, place in reader.places.items():
                values_of_norm = reader.floats(name) if name.endswith(_NORM) else None
                if values_of_norm is not None and len(place.dims) == 1:
                    norms[name] = values_of_norm.astype("<f4").tobytes()
    digest = hashlib.sha256()
    values: set[bytes] = set()
    for name, weights in sorted(norms.items()):
        digest.update(f"{name} {len(weights)}\n".encode())
        digest.update(weights)
        if len(values) < 2:
            values.update(weights[at : at + 4] for at in range(0, len(weights), 4))
    return digest.hexdigest() if len(values) > 1 else None


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model: the given one and, if it is split, its other parts, which may
    be missing.
    """
    return [path, *(path.with_name(f"{name}.gguf") for name in SplitName.of(path.stem).others)]
