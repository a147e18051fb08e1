"""The profile that a session shares its budget by: the one that is given, or the model's own."""

from __future__ import annotations

import os

from entropykv.model.geometry import ModelGeometry
from entropykv.policy.names import takes_profile
from entropykv.profile.find import find_profile
from entropykv.profile.profile import EntropyProfile


def given_profile(
    given: EntropyProfile | str | os.PathLike[str] | None,
) -> EntropyProfile | None:
    """Return the profile that was given, or whose path was; ProfileError if it cannot be read."""
    if given is None or isinstance(given, EntropyProfile):
        return given
    return EntropyProfile.load(given)


def profile_for(
    policy: str, geometry: ModelGeometry, given: EntropyProfile | None
) -> EntropyProfile | None:
    """Return what was given, else the model's own for a policy that takes one, else None."""
    if given is not None or not takes_profile(policy):
        return given
    return find_profile(geometry)
