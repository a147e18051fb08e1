"""Write tiny models of random geometry, each shape once."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.architectures import ARCHITECTURES, Architecture, write_architecture
from tests.architectures.description import model
from tests.support.tiny_models import write_bitnet, write_llama
from tests.support.tiny_writer import TinyRope

SERVED = ("plain", "windowed", "shared keys", "hybrid", "latent", "latent hybrid", "ALiBi")
"""The kinds of architectures that the headwise store serves, as keys of ARCHITECTURES."""
WIDE_GROUPS = (
    model("deci", ((72, 4, 8), (1, 2, 1), 16), name="deci-72", layers=3),
    model("deci", ((4, 130), (2, 1), 16), name="deci-130", layers=2),
)
"""Models with more query heads per KV head than a tile of attention rows, and layers with few."""
ARCHITECTURE_SHARE = 0.35
"""The share of runs with models of other architectures than llama."""

_HEAD_DIMS = (16, 20, 32, 48, 64, 80, 96, 128, 256)
_TRAINED = (64, 100, 256, 2048, 2048, 2048, 2**20)
_MOST_WIDTH = 1024


@dataclass(frozen=True)
class FuzzModel:
    """Hold a model file, and the facts about it that the checks need."""

    path: Path
    name: str
    n_vocab: int
    n_ctx_train: int
    rounding: float
    """How much rounding alone changes the logits, relative to their standard deviation."""
    heads: tuple[int, int, int] | None = None
    """Layers, query heads and KV heads, if all layers have equal numbers."""
    in_oracle: bool = False
    """True if tests/support/model_reference.py implements its forward pass."""
    gives_last_row: bool = True
    """True if llama.cpp's graph returns the last token's logits when only these are requested."""


def random_model(chance: random.Random, folder: Path) -> FuzzModel:
    """Choose a model, and write it to `folder` unless an earlier run did."""
    if chance.random() < ARCHITECTURE_SHARE:
        return _architecture(chance, folder)
    return _bitnet(chance, folder) if chance.random() < 0.15 else _llama(chance, folder)


def architecture_model(description: Architecture, folder: Path) -> FuzzModel:
    """Write the model of a description."""
    path = _written(folder, description.name, lambda part: write_architecture(part, description))
    trained = description.metadata["context_length"]
    assert isinstance(trained, int)
    return FuzzModel(
        path,
        description.name,
        description.n_vocab,
        trained,
        description.rounding,
        # cogvlm's graph returns the logits of the first token instead.
        gives_last_row=description.name != "cogvlm",
    )


def llama_model(folder: Path, **shape: Any) -> FuzzModel:
    """Return a model of llama's architecture, written with these arguments of write_llama()."""
    name = "llama-" + "-".join(f"{key}.{value}" for key, value in sorted(shape.items()))
    path = _written(folder, name, lambda part: write_llama(part, **shape))
    plain = "rope" not in shape and shape.get("architecture", "llama") == "llama"
    trained = shape.get("n_ctx_train", 2048)
    return FuzzModel(path, name, 320, trained, 2e-3, _heads(shape), in_oracle=plain)


def _architecture(chance: random.Random, folder: Path) -> FuzzModel:
    all_of_them = [one for kind in SERVED for one in ARCHITECTURES[kind]] + list(WIDE_GROUPS)
    return architecture_model(chance.choice(all_of_them), folder)


def _shape(chance: random.Random) -> dict[str, Any]:
    n_head_kv = chance.choice((1, 1, 2, 2, 3, 5))
    group = chance.choice((1, 2, 3, 4, 7, 8, 16, 40))
    head_dim = chance.choice(_HEAD_DIMS)
    while n_head_kv * group * head_dim > _MOST_WIDTH:
        group, head_dim = max(1, group // 2), max(16, head_dim // 2 // 2 * 2)
        n_head_kv = max(1, n_head_kv - 1)
    shape = {
        "n_layer": chance.choice((1, 2, 2, 3)),
        "n_head": n_head_kv * group,
        "n_head_kv": n_head_kv,
        "head_dim": head_dim,
        "n_ctx_train": chance.choice(_TRAINED),
    }
    width = shape["n_head"] * head_dim
    types = ("F32", "F32", "F16", "BF16", *(("Q8_0",) if width % 32 == 0 else ()))
    return {**shape, "weight_type": chance.choice(types)}


def _bitnet(chance: random.Random, folder: Path) -> FuzzModel:
    shape = _shape(chance)
    name = "bitnet-" + "-".join(f"{key}.{value}" for key, value in sorted(shape.items()))
    path = _written(folder, name, lambda part: write_bitnet(part, **shape))
    return FuzzModel(path, name, 320, shape["n_ctx_train"], 2e-3, _heads(shape))


def _llama(chance: random.Random, folder: Path) -> FuzzModel:
    shape = _shape(chance)
    if chance.random() < 0.3:
        shape["uneven"] = True
    kind = chance.random()
    if kind < 0.1:
        shape["architecture"] = chance.choice(("hunyuan-dense", "smollm3"))
    elif kind < 0.2:
        shape["rope"] = TinyRope(yarn_factor=4.0, n_ctx_orig=64)
    return llama_model(folder, **shape)


def _heads(shape: dict[str, Any]) -> tuple[int, int, int]:
    return shape["n_layer"], shape["n_head"], shape["n_head_kv"]


def _written(folder: Path, name: str, write: Any) -> Path:
    path = folder / f"{name}.gguf".replace("/", "_").replace(" ", "")
    if not path.exists():
        part = folder / f"{os.getpid()}.part"
        write(part)
        os.replace(part, path)
    return path
