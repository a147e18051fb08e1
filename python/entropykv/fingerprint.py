"""Which model a profile belongs to: its shape must be that of the model that uses it."""

from __future__ import annotations

import hashlib
from typing import Any

from entropykv.errors import ProfileError
from entropykv.gguf_header import read_header
from entropykv.model_file import ModelGeometry
from entropykv.profile import EntropyProfile
from entropykv.profile_parts import Fingerprint

_BLOCKS, _BLOCK_BYTES = 64, 4096


def fingerprint_of(geometry: ModelGeometry) -> Fingerprint:
    """Read the header of the model's file again and hash it."""
    return _fingerprint(geometry, read_header(geometry.path))


def identity_of(geometry: ModelGeometry) -> dict[str, Any]:
    """The fingerprint, and `weights_sample`: two models may have one header.

    The sample is a hash of blocks spread evenly over the tensors.
    """
    header = read_header(geometry.path)
    digest = hashlib.blake2b(digest_size=16)
    with open(geometry.path, "rb") as file:
        room = max(geometry.file_bytes - len(header) - _BLOCK_BYTES, 0)
        for block in range(_BLOCKS):
            file.seek(len(header) + room * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return {**_fingerprint(geometry, header).to_json(), "weights_sample": digest.hexdigest()}


def _fingerprint(geometry: ModelGeometry, header: bytes) -> Fingerprint:
    return Fingerprint(
        architecture=geometry.architecture,
        n_vocab=geometry.n_vocab,
        head_dim_k=geometry.head_dim_k,
        head_dim_v=geometry.head_dim_v,
        header_sha256=hashlib.sha256(header).hexdigest(),
    )


def check_model(
    profile: EntropyProfile, geometry: ModelGeometry, heads: tuple[int, int, int] | None = None
) -> None:
    """Raise ProfileError, naming the field, where the profile was made with another model.

    Another quantisation of the same model is no other model: see other_file(). `heads`: attention
    layers, and query and KV heads of each, by the graph; not every header tells which layers of a
    hybrid attend.
    """
    n_attending = sum(n > 0 for n in geometry.kv_heads_per_layer)
    of_header = (n_attending, geometry.n_head, max(geometry.kv_heads_per_layer))
    profile.check_geometry(*(heads or of_header), geometry.name)
    if profile.fingerprint is None:
        return
    for field in ("architecture", "n_vocab", "head_dim_k", "head_dim_v"):
        theirs, ours = getattr(profile.fingerprint, field), getattr(geometry, field)
        if theirs != ours:
            raise ProfileError(
                f"the profile of {profile.model or 'another model'} has fingerprint.{field} "
                f"{theirs}, but {geometry.name} has {ours}; calibrate again or use the profile of "
                "this model"
            )


def other_file(profile: EntropyProfile, geometry: ModelGeometry) -> str | None:
    """A sentence for the user where the profile fits but was made with another file; else None."""
    if profile.fingerprint is None:
        return None
    if profile.fingerprint.header_sha256 == fingerprint_of(geometry).header_sha256:
        return None
    return (
        f"the entropy profile was made with another file ({profile.model}) of the shape of "
        f"{geometry.path.name}; if that is not the same model in another quantisation, make a "
        "profile with `entropykv calibrate`"
    )
