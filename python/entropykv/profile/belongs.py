"""Check which model a profile belongs to: its shape must be that of the model that uses it."""

from __future__ import annotations

from entropykv.errors import ProfileError
from entropykv.model.geometry import ModelGeometry
from entropykv.model.header import read_header
from entropykv.model.identity import norms_of, shape_of
from entropykv.profile.parts import Fingerprint
from entropykv.profile.profile import EntropyProfile


def fingerprint_of(geometry: ModelGeometry) -> Fingerprint:
    """Read the header of the model's file again, and its norms, and hash them."""
    shape = shape_of(geometry, read_header(geometry.path))
    return Fingerprint(**shape, norms_sha256=norms_of(geometry.path))


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
    """Return a sentence for the user where a profile fits that may be of other weights; else None.

    Another quantisation of the same weights is told by their norms.
    """
    if profile.fingerprint is None or profile.fingerprint.is_of_weights(fingerprint_of(geometry)):
        return None
    return (
        f"the entropy profile was made with another file ({profile.model}) of the shape of "
        f"{geometry.path.name}; if that is not the same model in another quantisation, make a "
        "profile with `entropykv calibrate`"
    )
