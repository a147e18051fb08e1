"""Describe the data that a profile is based on, so that a worse profile never replaces a better
one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import CalibrationError, ProfileError
from entropykv.profile.parts import Fingerprint
from entropykv.profile.profile import EntropyProfile


@dataclass(frozen=True)
class Basis:
    """Hold the model that a profile belongs to, and how much text was read for it."""

    geometry: tuple[int, int, int]
    """The numbers of layers, query heads and KV heads."""
    fingerprint: Fingerprint | None
    """The model file that the profile was made with; None if unknown, for example if transformers
    ran the model.
    """
    texts: int
    """How many texts the entropies are averaged over."""
    curve_texts: int = 0
    """How many texts the loss curves are averaged over; 0 if there are no curves."""
    curve_length: int = 0
    """How many tokens each text of the loss curves has."""

    @classmethod
    def of(cls, profile: EntropyProfile) -> Basis:
        """Return the basis of an existing profile."""
        measured, curves = profile.measurement, profile.curves
        return cls(
            (profile.n_layer, profile.n_head, profile.n_head_kv),
            profile.fingerprint,
            0 if measured is None else len(measured.texts),
            0 if curves is None else curves.n_texts,
            0 if curves is None else curves.length,
        )

    def is_of_the_model_of(self, other: Basis) -> bool:
        """Tell whether both profiles can belong to the same model file."""
        ours, theirs = self.fingerprint, other.fingerprint
        same = ours is None or theirs is None or ours.is_of_file(theirs)
        return self.geometry == other.geometry and same

    def advantage_over(self, other: Basis) -> str | None:
        """Return a phrase for a message: from how much more text this basis comes than `other`.

        Returns None if it does not come from more text.
        """
        if self.curve_texts * self.curve_length > other.curve_texts * other.curve_length:
            has = f"loss curves from {self.curve_texts} texts of {self.curve_length} tokens"
            theirs = f"from {other.curve_texts} of {other.curve_length}"
            return f"{has}, the new one {theirs if other.curve_texts else 'none'}"
        if self.texts > other.texts:
            return f"entropies from {self.texts} texts, the new one from {other.texts}"
        return None


def refuse_worse(path: str | os.PathLike[str], new: Basis) -> None:
    """Raise CalibrationError if `path` already holds a better profile of the same model.

    A file that is not a profile may be replaced.
    """
    if not Path(path).exists():
        return
    with suppress(ProfileError):
        there = EntropyProfile.load(path)
        old = Basis.of(there)
        if old.is_of_the_model_of(new) and (advantage := old.advantage_over(new)) is not None:
            raise CalibrationError(
                f"{path}: the profile there has {advantage}; use --force to replace it, or -o for "
                "another file"
            )
