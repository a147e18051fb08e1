"""Tell which model a file holds: its shape, its header, and a sample of its weights."""

from __future__ import annotations

import hashlib
from typing import Any

from entropykv.model.geometry import ModelGeometry
from entropykv.model.header import read_header

_BLOCKS, _BLOCK_BYTES = 64, 4096


def shape_of(geometry: ModelGeometry, header: bytes) -> dict[str, Any]:
    """Return what a model's header says of it, and the header's hash.

    `header`: all bytes before the tensor data. Another quantisation of the same model has another.
    """
    return {
        "architecture": geometry.architecture,
        "n_vocab": geometry.n_vocab,
        "head_dim_k": geometry.head_dim_k,
        "head_dim_v": geometry.head_dim_v,
        "header_sha256": hashlib.sha256(header).hexdigest(),
    }


def identity_of(geometry: ModelGeometry) -> dict[str, Any]:
    """Return shape_of() and `weights_sample`, since two models may have one header.

    The sample is a hash of blocks spread evenly over the tensors. The file is read again.
    """
    header = read_header(geometry.path)
    digest = hashlib.blake2b(digest_size=16)
    with open(geometry.path, "rb") as file:
        room = max(geometry.file_bytes - len(header) - _BLOCK_BYTES, 0)
        for block in range(_BLOCKS):
            file.seek(len(header) + room * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return {**shape_of(geometry, header), "weights_sample": digest.hexdigest()}
