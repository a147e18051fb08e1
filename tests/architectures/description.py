"""What a tiny model of an architecture is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = int | float | bool | str | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True)
class Architecture:
    """One tiny model: the metadata that llama.cpp wants, and the optional tensors it lacks."""

    name: str
    architecture: str
    metadata: Mapping[str, Value]
    """Keys without the architecture's name in front."""
    without: tuple[str, ...] = ()
    """Patterns of names of tensors that the file leaves out."""
    n_vocab: int = 320
