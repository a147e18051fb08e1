"""Provide texts of random words for calibration, and settings that read only little of them."""

from __future__ import annotations

import importlib.util

import numpy as np

from entropykv.calibration.measure import CalibrationSettings
from entropykv.evaluation.texts import Text

WORDS = "the and of to in ion an he on at "
QUICK = CalibrationSettings(n_sequences=4, max_length=64, curve_length=96, n_threads=2)
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def some_texts(n: int = 6) -> list[Text]:
    rng = np.random.default_rng(4)
    words = WORDS.split()
    return [
        Text(f"{i}.txt", " ".join(words[int(w)] for w in rng.integers(0, len(words), 120)))
        for i in range(n)
    ]
