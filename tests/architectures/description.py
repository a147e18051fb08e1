"""Define how a tiny model of an architecture is described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = int | float | bool | str | tuple[int, ...] | tuple[float, ...]
Metadata = Mapping[str, Value]
PerLayer = int | tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """Describe one tiny model: metadata that llama.cpp requires, optional tensors that it lacks."""

    name: str
    architecture: str
    metadata: Metadata
    """Keys without the architecture's name in front."""
    without: tuple[str, ...] = ()
    """Patterns of names of tensors that llama.cpp would use but the file leaves out."""
    n_vocab: int = 320
    rounding: float = 2e-3
    """How much rounding alone changes the logits, relative to their standard deviation."""


def model(
    architecture: str,
    heads: tuple[PerLayer, PerLayer] | tuple[PerLayer, PerLayer, int],
    metadata: Metadata | None = None,
    *,
    name: str | None = None,
    layers: int = 4,
    width: int = 64,
    without: tuple[str, ...] = (),
    n_vocab: int = 320,
    rounding: float = 2e-3,
) -> Architecture:
    """Describe a model.

    `heads`: query heads, KV heads (one number, or one per layer) and the head's size; without a
    size, it is `width` / query heads. `metadata`: what this architecture requires in addition to
    the keys that all have.
    """
    common: dict[str, Value] = {
        "context_length": 2048,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": 64,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": n_vocab,
    }
    if len(heads) == 3:
        common["attention.key_length"] = common["attention.value_length"] = heads[2]
    return Architecture(
        name=name or architecture,
        architecture=architecture,
        metadata={**common, **(metadata or {})},
        # These files have no quantised weights, so they need no tensors with the factors of such
        # weights.
        without=("*.scale", "*.input_scale", *without),
        n_vocab=n_vocab,
        rounding=rounding,
    )
