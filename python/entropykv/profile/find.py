"""Find the entropy profile of a model, and check that a profile belongs to it."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from entropykv.errors import ProfileError
from entropykv.model.geometry import ModelGeometry
from entropykv.model.header import read_header
from entropykv.model.identity import norms_of, shape_of
from entropykv.profile.parts import Fingerprint
from entropykv.profile.profile import EntropyProfile

SUFFIX = ".entropy.json"
MOST_PROFILE_BYTES = 64 << 20
"""The largest profile in bytes that is read without being named; the profile of an 8B model has 451
KiB.
"""
_MOST_PROFILES = 64
_SHIPPED = Path(__file__).parents[1] / "profiles"


def profile_beside(model: str | os.PathLike[str]) -> Path:
    """Return the path at which `entropykv calibrate` saves the profile of a model file, and
    sessions find it.
    """
    return Path(model).with_suffix(SUFFIX)


def given_profile(
    given: EntropyProfile | str | os.PathLike[str] | None,
) -> EntropyProfile | None:
    """Return the given profile, which is read if it is given as a path; None if none is given.

    Raises ProfileError for a file that cannot be read.
    """
    if given is None or isinstance(given, EntropyProfile):
        return given
    return EntropyProfile.load(given)


def find_profile(geometry: ModelGeometry) -> EntropyProfile | None:
    """Return a model's profile, or None if there is none.

    It is searched beside the model file, then in its folder as the profile of another quantisation
    of the same weights, then in this package. Raises ProfileError if the one beside the file cannot
    be read, and ModelFileError if the model's file cannot.
    """
    found = _find(geometry)
    return None if found is None else found[1]


def profile_path(geometry: ModelGeometry) -> Path | None:
    """Return the path of the profile that find_profile() reads, or None; raises the same errors."""
    found = _find(geometry)
    return None if found is None else found[0]


def _find(geometry: ModelGeometry) -> tuple[Path, EntropyProfile] | None:
    beside = profile_beside(geometry.path)
    if beside.exists():
        return beside, EntropyProfile.load(beside)
    paths = [*_in_folder(beside.parent), *sorted(_SHIPPED.glob(f"*{SUFFIX}"))]
    own = fingerprint_of(geometry)
    matching = [(path, profile) for path in paths if (profile := _of_weights(path, own))]
    exact = (each for each in matching if each[1].fingerprint == own)
    return next(exact, matching[0] if matching else None)


def _in_folder(folder: Path) -> list[Path]:
    """Return the files in a folder that may be profiles, up to a limit; very large files are left
    out.
    """
    found = sorted(islice(folder.glob(f"*{SUFFIX}"), _MOST_PROFILES))
    return [path for path in found if path.is_file() and path.stat().st_size <= MOST_PROFILE_BYTES]


def _of_weights(path: Path, own: Fingerprint) -> EntropyProfile | None:
    """Return the profile at `path` if it is of the weights of `own`; None for a profile of other
    weights, and for a file that is not a profile.
    """
    try:
        profile = EntropyProfile.load(path)
    except ProfileError:
        return None
    mark = profile.fingerprint
    return profile if mark is not None and mark.is_of_weights(own) else None


def fingerprint_of(geometry: ModelGeometry) -> Fingerprint:
    """Read the header and the norms of the model's file again, and return their hashes; raises
    ModelFileError if the file cannot be read.
    """
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
