"""Describe tiny models of all architectures that llama.cpp decodes with, by kind of memory."""

from __future__ import annotations

from tests.architectures.description import Architecture
from tests.architectures.other import (
    ALIBI,
    DIFFUSION,
    HYBRID,
    LATENT_ATTENTION,
    LATENT_HYBRID,
    RECURRENT,
    SPARSE,
    UNFUSED,
)
from tests.architectures.plain import PLAIN
from tests.architectures.window import SHARED_KEYS, WINDOWED
from tests.architectures.writer import write_architecture

ARCHITECTURES: dict[str, tuple[Architecture, ...]] = {
    "plain": PLAIN,
    "windowed": WINDOWED,
    "shared keys": SHARED_KEYS,
    "hybrid": HYBRID,
    "recurrent": RECURRENT,
    "latent": LATENT_ATTENTION,
    "latent hybrid": LATENT_HYBRID,
    "ALiBi": ALIBI,
    "sparse": SPARSE,
    "unfused": UNFUSED,
    "diffusion": DIFFUSION,
}
"""The descriptions by kind."""
MODELS = {model.name: model for models in ARCHITECTURES.values() for model in models}
"""The descriptions by name."""

__all__ = ["ARCHITECTURES", "MODELS", "Architecture", "write_architecture"]
