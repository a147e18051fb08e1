"""Make entropy profiles for tests."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from entropykv.model.geometry import read_geometry
from entropykv.profile.curves import LossCurves
from entropykv.profile.find import fingerprint_of
from entropykv.profile.parts import Fingerprint, Measurement
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import NO_PROFILE, PREDICTOR_ONLY, ComparedWay, WayComparison


def example() -> EntropyProfile:
    entropies = np.array([[0.25, 1.0, 2.0, 5.0], [0.5, 1.5, 3.0, 4.0]])
    return EntropyProfile(
        n_layer=2,
        n_head=4,
        n_head_kv=2,
        n_ctx=128,
        head_entropies=entropies,
        model="tiny",
        fingerprint=Fingerprint("llama", 320, 16, 16, "0" * 64),
        measurement=Measurement(
            engine="entropykv",
            rows="quarters",
            max_length=128,
            seed=0,
            kv_type="f16",
            texts=(("a [1, 2].txt", 128), ("b", 100)),
            stability=0.9,
            quarters=entropies,
            all_rows=entropies / 2,
            spread=entropies / 10,
        ),
        curves=LossCurves(
            64,
            8,
            4,
            6,
            1,
            (0, 8, 32),
            np.full((2, 2, 3), 0.25),
            np.full((2, 2, 3), 1.5),
            np.array([0.5, 0.0]),
            "predicted",
        ),
        predictor=ScorePredictor(
            (np.full((2, 5), 0.5, np.float32), np.full((2, 3), -1.5, np.float32)),
            1976,
            0.75,
            np.array([[0.0, 0.25], [0.5, 0.05]]),
        ),
        comparison=WayComparison(
            (0.2,),
            1024,
            (0.75, 0.5),
            (
                ComparedWay(NO_PROFILE, ((0.5, 0.25),), ((0.5, 0.25),), ((1, 1, 0, 1),)),
                ComparedWay(PREDICTOR_ONLY, ((0.25, 0.125),), ((0.125, 0.5),), ((1, 1, 1, 1),)),
            ),
            PREDICTOR_ONLY,
        ),
    )


def with_field(profile: EntropyProfile, path: str, value: Any) -> dict[str, Any]:
    """Return the JSON of a profile in which the field at `path` has another value, or is removed if
    `value` is `...`.
    """
    data = copy.deepcopy(profile.to_dict())
    *parents, last = path.split(".")
    at: Any = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is ...:
        del at[last]
    elif isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return data


def predicting_profile(
    model: Path, n_features: list[int], n_head_kv: int, seed: int = 0
) -> EntropyProfile:
    """Return a profile whose predictor has random weights for `n_features`, one number per layer.

    It predicts shares of attention from 1e-6 to 1 for keys and values of a tiny model.
    """
    random = np.random.default_rng(seed)
    weights = []
    for n in n_features:
        of_layer = random.standard_normal((n_head_kv, n)).astype(np.float32) * np.float32(0.5)
        of_layer[:, -1] = -4.0
        weights.append(of_layer)
    profile = profile_of(model)
    # Layers that share K and V count once.
    n_layer = len(n_features)
    entropies = profile.head_entropies[:n_layer]
    predictor = ScorePredictor(tuple(weights), n_tokens=100)
    return replace(profile, n_layer=n_layer, head_entropies=entropies, predictor=predictor)


def profile_of(model: Path) -> EntropyProfile:
    """Return a profile for a model file in which all query heads have an entropy of 1."""
    geometry = read_geometry(model)
    shape = (geometry.n_layer, geometry.n_head)
    return EntropyProfile(
        *shape,
        max(geometry.kv_heads_per_layer),
        geometry.n_ctx_train,
        np.ones(shape),
        fingerprint=fingerprint_of(geometry),
    )
