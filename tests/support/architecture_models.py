"""Write models of tests/architectures, and open sessions of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entropykv import Session
from tests.architectures import Architecture
from tests.support.releases import write_known

WINDOW = 32  # The sliding window, in tokens, of the models of tests/architectures that have one.
TRAINED = 256


def some(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def written(model: Architecture, directory: Path, **metadata: Any) -> Path:
    file = directory / f"{model.name}.gguf"
    write_known(file, replace(model, metadata={**model.metadata, **metadata}))
    return file


def session_of(path: Path, **options: Any) -> Session:
    defaults = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "kv_type": "f16"}
    return Session(path, store="headwise", **{**defaults, **options})


def windowed_layers(session: Session) -> list[int]:
    layers = session._slot.store.layers  # type: ignore[attr-defined]
    return [number for number, shape in enumerate(layers) if shape.window == WINDOW]
