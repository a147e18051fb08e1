"""benchmarks/peers masks and compresses caches of transformers correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

_WHY = "needs torch and transformers: pip install entropykv[reference]"
torch = pytest.importorskip("torch", reason=_WHY)
transformers = pytest.importorskip("transformers", reason=_WHY)

from benchmarks.peers.dense import (  # noqa: E402
    Compressed,
    Continued,
    DensePrompt,
    attentions,
    with_own_prefill,
)

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 200, 96)]
TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 200, 24)]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).eval()


def continuation(model: Any, compressed: Compressed) -> Any:
    return Continued(model, compressed, len(PROMPT)).read(TOKENS)


def forward(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT + TOKENS])).logits[0, len(PROMPT) :].numpy()


def test_the_full_cache_continues_as_one_pass(model: Any) -> None:
    full = DensePrompt(model, PROMPT).compressed()
    assert (full.kept, full.held) == (1.0, 1.0)
    logits = continuation(model, full)
    np.testing.assert_allclose(logits, forward(model), rtol=1e-3, atol=1e-3)


def test_masked_entries_are_as_if_they_were_not_there(model: Any) -> None:
    """Masking entries gives the logits of removing them, in one layer and in all its KV heads."""
    dense = DensePrompt(model, PROMPT)
    pruned, masked = dense.compressed(), dense.compressed()
    layer = pruned.cache.layers[1]
    layer.keys, layer.values = layer.keys[:, :, 10:], layer.values[:, :, 10:]
    heads, entries = torch.arange(2).repeat_interleave(10), torch.arange(10).repeat(2)
    attentions(model)[1].masked_key_indices = (torch.zeros(20, dtype=torch.int), heads, entries)
    b = continuation(model, masked)
    a = continuation(model, pruned)
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    assert np.abs(a - forward(model)).max() > 0.1


def masked_prompt(model: Any) -> Continued:
    """Return a prompt that was read in full, of which 40 entries are then masked in KV head 1 of
    the model's second layer. The mask is set in the model's attention module.
    """
    masked = DensePrompt(model, PROMPT).compressed()
    indices = torch.zeros(40, dtype=torch.int), torch.ones(40, dtype=torch.int), torch.arange(40)
    attentions(model)[1].masked_key_indices = indices
    return Continued(model, masked, len(PROMPT))


def test_what_is_masked_stays_so_token_by_token(model: Any) -> None:
    expected = masked_prompt(model).read(TOKENS)
    continued = masked_prompt(model)
    rows = [continued.read([token])[0] for token in TOKENS]
    assert continued.position == len(PROMPT) + len(TOKENS)
    np.testing.assert_allclose(np.stack(rows), expected, rtol=1e-3, atol=1e-3)
    assert np.abs(expected - forward(model)).max() > 0.1


def test_what_is_forgotten_again_leaves_nothing(model: Any) -> None:
    """After truncate(), what was read behind the prompt leaves no trace, so that each question
    begins at its end.
    """
    expected = masked_prompt(model).read(TOKENS)
    continued = masked_prompt(model)
    for other in (PROMPT[:50], PROMPT[:1]):
        continued.read(other)
        continued.truncate(len(PROMPT))
    np.testing.assert_allclose(continued.read(TOKENS), expected, rtol=1e-3, atol=1e-3)


def token_by_token(model: Any, compressed: Compressed) -> Any:
    """Continue as kvpress's pipeline does, by its own masks and token by token; return logits."""
    rows = []
    for index, token in enumerate(TOKENS):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([[token]]),
                past_key_values=compressed.cache,
                position_ids=torch.tensor([[len(PROMPT) + index]]),
            ).logits
        rows.append(logits[0, -1].numpy())
    return np.stack(rows)


@pytest.mark.parametrize(
    "name", ["SnapKV", "PyramidKV", "AdaKV", "CriticalAdaKV", "StreamingLLM", "Compactor"]
)
def test_a_recorded_prompt_gives_what_kvpress_itself_does(model: Any, name: str) -> None:
    kvpress = pytest.importorskip("kvpress", reason="needs kvpress: pip install entropykv[peers]")
    makers = {
        "SnapKV": lambda: kvpress.SnapKVPress(0.6, window_size=8),
        "PyramidKV": lambda: kvpress.PyramidKVPress(0.6, window_size=8, beta=5),
        "AdaKV": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.6, window_size=8)),
        "CriticalAdaKV": lambda: kvpress.CriticalAdaKVPress(
            kvpress.SnapKVPress(0.6, window_size=8)
        ),
        "StreamingLLM": lambda: kvpress.StreamingLLMPress(0.6),
        "Compactor": lambda: kvpress.CompactorPress(compression_ratio=0.6, sketch_dimension=8),
    }
    torch.manual_seed(3)
    theirs = with_own_prefill(model, makers[name](), PROMPT)
    expected = token_by_token(model, theirs)
    torch.manual_seed(3)
    ours = DensePrompt(model, PROMPT).compressed(makers[name]())
    assert (ours.kept, ours.held) == (theirs.kept, theirs.held)
    assert ours.kept == pytest.approx(0.4, abs=0.02)
    logits = continuation(model, ours)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
