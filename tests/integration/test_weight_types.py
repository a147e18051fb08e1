"""Models quantized to any of llama.cpp's weight types give the logits of stock llama.cpp."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import EntropyLlama, Session
from entropykv.evaluation.stock import StockSession
from tests.support.architecture_reading import decided, greedy, next_logits, read, stock
from tests.support.logits import relative_error, tokens_for
from tests.support.tiny_models import write_bitnet, write_llama
from tests.support.weight_types import FILE_TYPES, quantised

WRITERS = {"llama": write_llama, "bitnet": write_bitnet}
TOKENS = tokens_for(150)

every_type = pytest.mark.parametrize(
    ("architecture", "weight_type"),
    [*(("llama", name) for name in FILE_TYPES), ("bitnet", "TQ1_0"), ("bitnet", "TQ2_0")],
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write F32 models with rows of 256 weights, which is one block of the widest types."""
    folder = tmp_path_factory.mktemp("originals")
    paths = {name: folder / f"{name}.gguf" for name in WRITERS}
    for name, write in WRITERS.items():
        write(paths[name], n_head=4, n_head_kv=2, head_dim=64, n_ff=256, weight_type="F32")
    return paths


@pytest.fixture
def path(architecture: str, weight_type: str, originals: dict[str, Path], tmp_path: Path) -> Path:
    return quantised(originals[architecture], tmp_path, weight_type)


@every_type
def test_logits_and_text_are_those_of_stock(path: Path, weight_type: str) -> None:
    """Logits differ from stock's hardly more than stock's own with and without flash attention do.

    A difference in the last bit of an f32 can change how an activation is rounded to 8 bits, which
    makes it hundreds of times as large.
    """
    unfused, fused = stock(path), stock(path, flash=True)
    with Session(
        path, n_ctx=256, store="headwise", kv_type="f16", n_ubatch=64, n_threads=1
    ) as ours:
        for step in (len(TOKENS), 1):
            expected = read(unfused, TOKENS, step)
            rounding = max(2e-3, 1.25 * relative_error(read(fused, TOKENS, step), expected))
            assert relative_error(read(ours, TOKENS, step), expected) < rounding
            for session in (unfused, fused, ours):
                session.reset()
        if weight_type in ("F32", "F16"):
            assert rounding == 2e-3
        text, rows = greedy(unfused, TOKENS[:30], 64)
        chosen = [next_logits(ours, TOKENS[:30]).argmax()]
        chosen += [next_logits(ours, [token]).argmax() for token in text[:-1]]
    close(unfused, fused)
    sure = decided(rows, rounding)
    assert sure.mean() > 0.6
    assert np.array_equal(np.array(chosen)[sure], np.array(text)[sure])


@pytest.mark.parametrize("architecture", ["llama"])
@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_entropy_llama_computes_what_a_session_computes(path: Path) -> None:
    """EntropyLlama and Session give the same bits for types that llama.cpp repacks where it may,
    which changes sums.
    """
    with Session(path, n_ctx=256, kv_type="f16", n_threads=1, learn=False) as session:
        expected = [next_logits(session, part) for part in (TOKENS[:64], TOKENS[64:65])]
    # Compute all logits, as the session does: a product of one row may have other last bits than
    # one of many.
    arguments: dict[str, Any] = {
        "n_threads": 1,
        "n_threads_batch": 1,
        "verbose": False,
        "logits_all": True,
    }
    with closing(EntropyLlama(path, n_ctx=256, kv_type="f16", learn=False, **arguments)) as llama:
        found = []
        for part in (TOKENS[:64], TOKENS[64:65]):
            llama.eval(part)
            found.append(np.array(llama._session.logits).ravel())
    assert all(map(np.array_equal, found, expected))


@every_type
def test_half_the_budget_is_not_exceeded(path: Path) -> None:
    with Session(
        path, n_ctx=256, kv_budget=0.5, store="headwise", kv_type="f16", n_ubatch=32, n_threads=1
    ) as session:
        prompt, text = read(session, TOKENS[:-20], 256), read(session, TOKENS[-20:], 1)
        stats = session.stats()
    assert np.isfinite(prompt).all()
    assert np.isfinite(text).all()
    assert stats.evictions > 0
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget


def close(*sessions: StockSession) -> None:
    for session in sessions:
        session.close()
