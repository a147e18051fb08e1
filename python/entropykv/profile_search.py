"""The entropy profile that belongs to a model, where nobody names one."""

from __future__ import annotations

import os
from pathlib import Path

from entropykv.fingerprint import fingerprint_of
from entropykv.model_file import ModelGeometry
from entropykv.policy import takes_profile
from entropykv.profile import EntropyProfile

SUFFIX = ".entropy.json"
_SHIPPED = Path(__file__).parent / "profiles"


def profile_beside(model: str | os.PathLike[str]) -> Path:
    """Where `entropykv calibrate` leaves the profile of a model file, and sessions look for it."""
    return Path(model).with_suffix(SUFFIX)


def load_profile(
    given: EntropyProfile | str | os.PathLike[str] | None,
) -> EntropyProfile | None:
    """Return the profile that was given, or whose path was; ProfileError if it cannot be read."""
    if given is None or isinstance(given, EntropyProfile):
        return given
    return EntropyProfile.load(given)


def find_profile(policy: str, geometry: ModelGeometry) -> EntropyProfile | None:
    """Return a model's profile, for a policy that takes one.

    It is beside the model file, or in this package for exactly this file. Raises ProfileError for
    one that cannot be read.
    """
    if not takes_profile(policy):
        return None
    beside = profile_beside(geometry.path)
    if beside.exists():
        return EntropyProfile.load(beside)
    return _shipped(geometry)


def _shipped(geometry: ModelGeometry) -> EntropyProfile | None:
    own = fingerprint_of(geometry)
    profiles = map(EntropyProfile.load, sorted(_SHIPPED.glob(f"*{SUFFIX}")))
    return next((profile for profile in profiles if profile.fingerprint == own), None)
