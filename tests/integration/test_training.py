"""The training script learns, resumes after an interruption, and exports the trained model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session

torch = pytest.importorskip("torch", reason="needs the extra: pip install 'entropykv[reference]'")

from training.facts import Writer  # noqa: E402
from training.model import BitNet, Shape, place_induction, ternary  # noqa: E402
from training.tokenizer import WordTokenizer  # noqa: E402

pytestmark = pytest.mark.reference
STEP = 8192


def train(out: Path, steps: int) -> dict[str, object]:
    command = [sys.executable, "-m", "training.train", "--out", str(out), "--eager"]
    command += ["--tokens", str(steps * STEP), "--start", "0", "--rate", "1e-3"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    state: dict[str, object] = torch.load(out / "checkpoint.pt", weights_only=True)
    return state


def test_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    first = train(tmp_path, 1)
    before = dict(first["model"])
    second = train(tmp_path, 3)
    assert first["progress"]["step"] == 1
    assert second["progress"]["step"] == 3
    assert len(json.loads((tmp_path / "log.json").read_text())) == 2
    name = "layers.2.q_proj.weight"
    assert not torch.equal(before[name], second["model"][name])


def test_the_export_computes_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(2)
    tokenizer = WordTokenizer()
    model = BitNet(Shape(n_vocab=len(tokenizer)))
    place_induction(model)
    torch.save({"model": model.state_dict()}, tmp_path / "checkpoint.pt")
    command = [sys.executable, "-m", "training.export", str(tmp_path), "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    ids = tokenizer.encode(Writer(1).training_document(200, 0.2, 0.4).words)
    with torch.no_grad():
        expected = model.head(model.hidden(torch.tensor([ids]), torch.float32))[0].numpy()
    with Session(tmp_path / "bitnet-facts.gguf", n_ctx=256, kv_type="f16") as session:
        logits = session.decode(ids, all_logits=True)
    error = np.sqrt(np.square(logits - expected).mean()) / expected.std()
    assert error < 5e-2


def test_ternary_weights_have_three_values_and_pass_the_gradient() -> None:
    weight = torch.randn(64, 32, requires_grad=True)
    rounded = ternary(weight)
    scale = weight.abs().mean()
    levels = (rounded / scale).detach()
    torch.testing.assert_close(levels, levels.round())
    assert sorted(levels.round().unique().tolist()) == [-1.0, 0.0, 1.0]
    rounded.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))
