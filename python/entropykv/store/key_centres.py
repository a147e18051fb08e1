"""Decide how the keys of every KV head are stored, from the biases that the model adds to them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.model.key_biases import KeyBias, read_key_biases
from entropykv.policy.resolved_config import ResolvedConfig

KeyCentres = list[npt.NDArray[np.float32]]
"""For each layer, [KV head][centre, unit][value of a key], or an empty array."""


def key_centres(config: ResolvedConfig, hook: _core.GraphHook) -> KeyCentres:
    """Return what is subtracted from the keys of the layers, and the units that divide the rest.

    Empty if keys are stored as they are: see ResolvedConfig.centres_keys. That is also so if the
    model rotates keys in a way that is not known, and in layers that cap their logits, because a
    centre changes all logits of a query by the same number.
    """
    if not config.centres_keys or hook.rope_obstacle:
        return []
    biases = read_key_biases(config.geometry)
    centres = [
        np.empty(0, np.float32) if node.softcap else _centres_of(node, biases.get(node.cache_layer))
        for node in hook.nodes
    ]
    return centres if any(layer.size for layer in centres) else []


def _centres_of(node: _core.AttentionNode, of: KeyBias | None) -> npt.NDArray[np.float32]:
    if of is None or of.bias.shape != (node.shape.n_head_kv, node.shape.k_dim) or node.shape.latent:
        return np.empty(0, np.float32)
    return np.array(
        [
            _core.key_centre(bias.tolist(), spread.tolist(), node.rope, node.rope_magnitude)
            for bias, spread in zip(of.bias, of.spread, strict=True)
        ],
        np.float32,
    )


def digest_of(centres: Sequence[npt.NDArray[np.float32]]) -> str | None:
    """Return a hash that is equal where keys are stored alike; None if they are stored as
    they are.
    """
    if not centres:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for layer in centres:
        digest.update(f"{layer.shape}\n".encode())
        digest.update(layer.astype("<f4").tobytes())
    return digest.hexdigest()
