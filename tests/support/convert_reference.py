"""Make reference models in transformers, to compare conversions with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.exact_logits import Logits
from tests.support.hf_files import write_tokenizer
from tests.support.hf_names import PROJECTIONS

_WHY = "needs torch and transformers: pip install entropykv[reference]"


torch = pytest.importorskip("torch", reason=_WHY)


transformers = pytest.importorskip("transformers", reason=_WHY)


bitnet = pytest.importorskip("transformers.integrations.bitnet", reason=_WHY)


safetensors_torch = pytest.importorskip("safetensors.torch", reason=_WHY)


N_VOCAB = 320
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, N_VOCAB, 90)]


def reference_logits(model: Any) -> Logits:
    with torch.no_grad():
        logits: Logits = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    return logits


def projections(model: Any) -> dict[str, Any]:
    """Return the projections of all layers by llama.cpp's names of their weights."""
    found = {}
    for layer, block in enumerate(model.model.layers):
        for theirs, ours in PROJECTIONS.items():
            found[f"blk.{layer}.{ours}"] = block.get_submodule(theirs)
    return found


def make_ternary(model: Any) -> None:
    """Replace every projection by its ternary values times their scale, as transformers'
    WeightQuant does.
    """
    with torch.no_grad():
        for module in projections(model).values():
            module.weight.copy_(bitnet.WeightQuant.apply(module.weight))


def add_quantization(directory: Path, linear_class: str, mode: str) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": mode,
    }
    path.write_text(json.dumps(config))


def save_checkpoint(model: Any, directory: Path, **options: Any) -> None:
    """Save a checkpoint with a tokenizer, which the conversion requires."""
    model.save_pretrained(directory, **options)
    write_tokenizer(directory)


def pack_checkpoint(directory: Path, model: Any, linear_class: str) -> dict[str, Any]:
    """Pack a saved model with transformers' own pack_weights; return the packed modules by
    llama.cpp's names.
    """
    path = directory / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    running = {}
    random = np.random.default_rng(3)
    for name, module in projections(model).items():
        out_features, in_features = module.weight.shape
        scale = torch.tensor([random.uniform(0.01, 0.1)], dtype=torch.float32)
        ternary = torch.sign(bitnet.WeightQuant.apply(module.weight.detach()))
        packed = bitnet.pack_weights(ternary.clone())
        layer, projection = name.split(".")[1:]
        theirs = next(key for key, value in PROJECTIONS.items() if value == projection)
        key = f"model.layers.{layer}.{theirs}"
        stored = scale if linear_class == "autobitlinear" else 1.0 / scale
        tensors[f"{key}.weight"], tensors[f"{key}.weight_scale"] = packed, stored
        runs = {"autobitlinear": bitnet.AutoBitLinear, "bitlinear": bitnet.BitLinear}[linear_class]
        running[name] = runs(in_features, out_features, bias=False, dtype=torch.float32)
        running[name].load_state_dict({"weight": packed, "weight_scale": stored})
    safetensors_torch.save_file(tensors, path, {"format": "pt"})
    add_quantization(directory, linear_class, "offline")
    return running
