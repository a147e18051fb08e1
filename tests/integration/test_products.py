"""Statistics say whether our kernels or llama.cpp compute products, and a token has the same bits
alone and among drafts.
"""

from __future__ import annotations

import functools
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from entropykv import Session, _core
from entropykv.evaluation.stock import StockSession
from tests.support.architecture_reading import read
from tests.support.logits import relative_error, tokens_for
from tests.support.tiny_models import write_llama
from tests.support.weight_types import FILE_TYPES, quantised

OURS = (
    *("TQ2_0", "TQ1_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    *(("F16",) if "avx512vnni" in _core.product_kernels() else ()),
)
STOCKS_FOR_ONE_TOKEN = () if "avx512vnni" in _core.product_kernels() else ("Q6_K",)
TOKENS = tokens_for(70)

needs_kernels = pytest.mark.skipif(
    not _core.product_kernels() or llama_cpp.llama_supports_gpu_offload(),
    reason="products are llama.cpp's on this machine",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write F32 weights with rows of 256: one block of the widest types."""
    path = tmp_path_factory.mktemp("original") / "llama.gguf"
    write_llama(path, n_head=4, n_head_kv=2, head_dim=64, n_ff=256, weight_type="F32")
    return path


@needs_kernels
@pytest.mark.parametrize("store", ["headwise", "flat"])
@pytest.mark.parametrize("weight_type", FILE_TYPES)
def test_the_statistics_say_who_computes(
    weight_type: str, store: str, original: Path, tmp_path: Path
) -> None:
    path = quantised(original, tmp_path, weight_type)
    with Session(path, n_ctx=128, store=store, n_threads=2) as session:
        session.decode(TOKENS[:-1])
        session.decode(TOKENS[-1:])
        stats = session.stats()
    kernels = _core.product_kernels()[-1] if weight_type in OURS else "llama.cpp"
    if weight_type in STOCKS_FOR_ONE_TOKEN:
        kernels += ", llama.cpp"
    assert set(stats.products.values()) == {kernels}
    assert {name.lower() for name in stats.products} == {weight_type.lower()}
    assert (stats.products_bytes_scratch > 0) == bool(_core.product_kernels())


@needs_kernels
@pytest.mark.parametrize("weight_type", OURS)
def test_one_token_is_computed_as_many_are(
    weight_type: str, original: Path, tmp_path: Path
) -> None:
    """Tokens read one by one have logits as close to those of one batch as with stock llama.cpp."""
    path = quantised(original, tmp_path, weight_type)
    stock = StockSession(path, n_ctx=128, n_threads=1)
    with Session(path, n_ctx=128, store="headwise", kv_type="f16", n_threads=1) as ours:
        differences = []
        for session in (stock, ours):
            together = read(session, TOKENS, len(TOKENS))
            session.reset()
            differences.append(relative_error(read(session, TOKENS, 1), together))
    stock.close()
    assert np.isfinite(differences).all()
    assert differences[1] < max(2e-3, 1.25 * differences[0])


@needs_kernels
@pytest.mark.parametrize("kernels", _core.product_kernels())
@pytest.mark.parametrize("weight_type", OURS)
def test_a_token_has_the_same_bits_among_drafts_as_alone_and_without_drafts(
    weight_type: str, kernels: str, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has the same bits among drafts, alone, and without drafts.

    In Q6_K without AVX-512, llama.cpp computes all products of so few tokens.
    """
    if weight_type == "F16" and kernels != "avx512vnni":
        pytest.skip("products in F16 are llama.cpp's")
    hook = functools.partial(_core.GraphHook, products=kernels)
    monkeypatch.setattr(_core, "GraphHook", hook)
    path = quantised(original, tmp_path, weight_type)
    states = []
    for spec_type, drafts in (("none", 0), ("ngram", 0), ("ngram", 15)):
        options = {"n_ctx": 128, "store": "headwise", "n_threads": 1, "spec_type": spec_type}
        with Session(path, **options) as session:
            session.decode(TOKENS[:40])
            session.decode(TOKENS[40:54])
            while session.position < len(TOKENS):
                token, *following = TOKENS[session.position :]
                session.reader.read_drafts(token, following[:drafts], lambda rows: len(rows) - 1)
            if drafts:
                assert session.reader.drafting is not None
                assert session.reader.drafting.counts.accepted > 8
            states.append(session.files.save_state())
            assert any(kernels in by for by in session.stats().products.values())
    assert states[0] == states[1] == states[2]
