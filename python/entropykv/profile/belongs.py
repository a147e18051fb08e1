"""Check that a profile belongs to a model: the shapes must be equal."""

from __future__ import annotations

from entropykv.errors import ProfileError
from entropykv.model.geometry import ModelGeometry
from entropykv.model.header import read_header
from entropykv.model.identity import norms_of, shape_of
from entropykv.profile.parts import Fingerprint
from entropykv.profile.profile import EntropyProfile


def fingerprint_of(geometry: ModelGeometry) -> Fingerprint:
    """Read the header and the norms of the model's file again, and return their hashes."""
    shape = shape_of(geometry, read_header(geometry.path))
    return Fingerprint(**shape, norms_sha256=norms_of(geometry.path))


def check_model(
    profile: EntropyProfile, geometry: ModelGeometry, heads: tuple[int, int, int] | None = None
) -> None:
    """Raise ProfileError, naming the field, if the profile was made with another model.

    Another quantisation of the same model is accepted: see other_file(). `heads`: the numbers of
    attention layers, and of query and KV heads per layer, as llama.cpp's graph has them; not every
    header tells which layers of a hybrid model attend.
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
    """Return a note for the user if a profile fits by shape but may be of other weights; else None.

    Another quantisation of the same weights is recognised by the norms.
    """
    if profile.fingerprint is None or profile.fingerprint.is_of_weights(fingerprint_of(geometry)):
        return None
    return (
        f"the entropy profile was made with another file ({profile.model}) of the shape of "
        f"{geometry.path.name}; if that is not the same model in another quantisation, make a "
        "profile with `entropykv calibrate`"
    )
