"""Find the entropy profile that belongs to a model, where nobody names one."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from entropykv.errors import ProfileError
from entropykv.model.geometry import ModelGeometry
from entropykv.profile.belongs import fingerprint_of
from entropykv.profile.parts import Fingerprint
from entropykv.profile.profile import EntropyProfile

SUFFIX = ".entropy.json"
MOST_PROFILE_BYTES = 64 << 20
"""Bytes of a profile that nobody named; one of a model of 8B parameters has 451 KiB."""
_MOST_PROFILES = 64
_SHIPPED = Path(__file__).parents[1] / "profiles"


def profile_beside(model: str | os.PathLike[str]) -> Path:
    """Return where `entropykv calibrate` leaves the profile of a model file, and sessions look."""
    return Path(model).with_suffix(SUFFIX)


def find_profile(geometry: ModelGeometry) -> EntropyProfile | None:
    """Return a model's profile, or None where it has none.

    It is beside the model file; or in its folder, for another quantisation of the same weights; or
    in this package. Raises ProfileError for one beside the file that cannot be read.
    """
    found = _find(geometry)
    return None if found is None else found[1]


def profile_path(geometry: ModelGeometry) -> Path | None:
    """Return the file of find_profile(); raises as it does."""
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
    """Return the files in a folder that may be profiles, some of very many; none of huge ones."""
    found = sorted(islice(folder.glob(f"*{SUFFIX}"), _MOST_PROFILES))
    return [path for path in found if path.is_file() and path.stat().st_size <= MOST_PROFILE_BYTES]


def _of_weights(path: Path, own: Fingerprint) -> EntropyProfile | None:
    """Return a profile of the same weights; None for others, and for files that are no profiles."""
    try:
        profile = EntropyProfile.load(path)
    except ProfileError:
        return None
    mark = profile.fingerprint
    return profile if mark is not None and mark.is_of_weights(own) else None
