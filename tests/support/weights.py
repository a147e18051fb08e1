"""Compare the weights of converted files with their sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from tests.support.i2s_files import I2sModel


def read_weights(path: Path) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


def assert_weights_are(path: Path, model: I2sModel) -> None:
    """Assert that a converted file has the ternary values and scales of a model, to the bit."""
    weights = read_weights(path)
    for name, ternary in model.ternary.items():
        assert np.array_equal(weights[f"{name}.weight"], ternary), name
        assert weights[f"{name}.scale"].tolist() == [model.scales[name]], name
