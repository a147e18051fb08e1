"""A device that works in plain memory, as BLAS does, keeps what ggml gives to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import _core
from tests.support import plain_memory_device
from tests.support.command import python
from tests.support.logits import relative_error
from tests.support.tiny_models import write_llama
from tests.support.weight_types import quantised

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 40  # More tokens than the 32 from which on the device computes products.
FEW = 31
CHILD = f"""
import json, sys
from tests.support.plain_memory_device import PlainMemoryDevice
path, store, kind, count = sys.argv[1:]
device = PlainMemoryDevice() if kind == "device" else None
from entropykv import Session
from tests.support.logits import tokens_for
tokens = tokens_for({ENOUGH} + 1)
with Session(path, n_ctx=128, store=store, n_threads=2, policy="streaming") as session:
    session.decode(tokens[:int(count)])
    logits = session.logits.tolist()
    session.decode(tokens[-1:])
    print(json.dumps({{"logits": [logits, session.logits.tolist()],
                       "products": session.stats().products,
                       "of_device": device.products if device else 0,
                       "refused": device.refused if device else []}}))
"""

pytestmark = pytest.mark.skipif(
    not _core.product_kernels() or not plain_memory_device.is_known(),
    reason="no products of ours, or another llama.cpp, whose devices look different",
)


without_blas = pytest.mark.skipif(
    plain_memory_device.has_blas(), reason="BLAS takes what the device would be given"
)
with_blas = pytest.mark.skipif(
    not plain_memory_device.has_blas(), reason="llama.cpp was built without BLAS: make test-blas"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain_memory")
    original = folder / "llama.gguf"
    write_llama(original, n_head=4, n_head_kv=2, head_dim=64, n_ff=256, weight_type="F32")
    return quantised(original, folder, "Q4_1")


def read(model: Path, store: str, kind: str, count: int) -> Any:
    """Read `count` tokens and one more in a process of its own; return its report."""
    return json.loads(python(CHILD, model, store, kind, count, cwd=ROOT).stdout)


@without_blas
@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_what_a_device_was_given_stays_as_it_is(model: Path, store: str) -> None:
    plain = read(model, store, "plain", ENOUGH)
    found = read(model, store, "device", ENOUGH)
    assert found["refused"] == []
    assert found["of_device"] > 0
    ours = _core.product_kernels()[-1]
    assert plain["products"] == {"q4_1": ours}
    # The product of one token is computed by our kernels.
    assert found["products"] == {"q4_1": f"{ours}, llama.cpp"}
    for one, other in zip(found["logits"], plain["logits"], strict=True):
        assert relative_error(np.array(one), np.array(other)) < 0.02


@without_blas
def test_what_no_device_takes_is_ours(model: Path) -> None:
    found = read(model, "headwise", "device", FEW)
    assert found["of_device"] == 0
    assert found["refused"] == []
    assert found["products"] == {"q4_1": _core.product_kernels()[-1]}


@with_blas
@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_what_blas_was_given_stays_there(model: Path, store: str) -> None:
    ours = _core.product_kernels()[-1]
    assert read(model, store, "plain", FEW)["products"] == {"q4_1": ours}
    found = read(model, store, "plain", ENOUGH)
    assert found["products"] == {"q4_1": f"{ours}, llama.cpp"}
    assert np.isfinite(found["logits"]).all()
