"""Measure the time to fit a predictor for a large model, and the size of its profile.

The lessons are random, in the shape of an 8B model (32 layers, 8 KV heads, keys and values of 128
numbers). No model is read, because only shapes matter here.

python benchmarks/predictor.py
python benchmarks/predictor.py --layers 30 --kv-heads 3 --head-dim 64   # SmolLM2-135M
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from entropykv import EntropyProfile
from entropykv.profile.growing import GrowingPredictor
from entropykv.profile.predictor import Lessons, ScorePredictor

T = TypeVar("T")


def main() -> None:
    """Fit a predictor to random lessons, and print a line for each figure."""
    options = _options()
    random = np.random.default_rng(0)
    n_features = 2 * options.head_dim + options.head_dim // 2 + 3
    shape = (options.layers, options.kv_heads, n_features)
    lessons = _lessons(random, shape, options.tokens)
    print(f"{shape[0]} layers, {shape[1]} KV heads, {n_features} features, {options.tokens} tokens")
    print(f"sums of the lessons: {sum(s.nbytes for _, s in lessons) / 2**20:.0f} MiB")
    values = slice(options.head_dim, 2 * options.head_dim)
    growing = GrowingPredictor([values] * options.layers, None)
    _timed("fit", lambda: growing.grow(lessons))
    predictor = growing.predictor
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profile = _profile(shape, predictor)
        _timed("save the profile", lambda: profile.save(path))
        _timed("load the profile", lambda: EntropyProfile.load(path))
        weights = sum(of_layer.nbytes for of_layer in predictor.weights)
        print(f"weights: {weights / 1024:.0f} KiB; file: {path.stat().st_size / 1024:.0f} KiB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 32), ("kv-heads", 8), ("head-dim", 128), ("tokens", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    return parser.parse_args()


def _lessons(random: np.random.Generator, shape: tuple[int, int, int], n_tokens: int) -> Lessons:
    """Return lessons of random features, (n_layer, n_head_kv, n_features), that are as correlated
    as a model's: features mix a third as many random numbers.
    """
    n_layer, n_head_kv, n_features = shape
    lessons = []
    for _ in range(n_layer):
        sums = np.empty((n_head_kv, n_features + 1, n_features + 1))
        for of_head in sums:
            hidden = random.standard_normal((n_tokens, n_features // 3))
            rows = hidden @ random.standard_normal((n_features // 3, n_features + 1))
            rows += random.standard_normal(rows.shape)
            rows[:, -2] = 1.0
            of_head[:] = rows.T @ rows
        lessons.append((n_tokens, sums))
    return lessons


def _profile(shape: tuple[int, int, int], predictor: ScorePredictor) -> EntropyProfile:
    n_layer, n_head_kv, _ = shape
    entropies = np.full((n_layer, 4 * n_head_kv), 2.0)
    return EntropyProfile(n_layer, 4 * n_head_kv, n_head_kv, 8192, entropies, predictor=predictor)


def _timed(what: str, run: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = run()
    print(f"{what}: {time.perf_counter() - start:.2f} s")
    return result


if __name__ == "__main__":
    main()
