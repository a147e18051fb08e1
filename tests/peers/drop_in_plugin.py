"""Let pytest run llama-cpp-python's own tests with other models, and with EntropyLlama if the
variable PEER_CLASS is not empty.

PEER_REPORT names the file that gets the outcome of every test, as JSON, and PEER_MODELS the files
that take the place of those at the Hub, by their repositories.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import huggingface_hub
import llama_cpp
import numpy as np
import pytest

from entropykv import EntropyLlama
from tests.peers.plugin import pytest_runtest_logreport

__all__ = ["pytest_load_initial_conftests", "pytest_runtest_logreport"]


class WithWholeBudget(EntropyLlama):
    """Hold the whole context, as llama_cpp.Llama does."""

    def __init__(self, model_path: str, **arguments: Any) -> None:
        """Load the model."""
        super().__init__(model_path, kv_budget="1.0", **arguments)


def _log_softmax(logits: Any) -> Any:
    """Return logarithms of probabilities, as scipy does."""
    shifted = logits - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace scipy's log_softmax, hf_hub_download() and, with PEER_CLASS, llama_cpp.Llama."""
    special = types.ModuleType("scipy.special")
    special.log_softmax = _log_softmax  # type: ignore[attr-defined]
    sys.modules["scipy"], sys.modules["scipy.special"] = types.ModuleType("scipy"), special
    models = json.loads(os.environ["PEER_MODELS"])
    fetched: Any = lambda repository, _file: models[repository]  # noqa: E731
    huggingface_hub.hf_hub_download = fetched
    if os.environ.get("PEER_CLASS"):
        stand_in: Any = WithWholeBudget
        llama_cpp.Llama = stand_in
