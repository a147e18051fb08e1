"""Every architecture that llama.cpp decodes with: the logits of stock, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import Session, UnsupportedModelError
from entropykv.stock import StockSession
from tests.architectures import ARCHITECTURES, Architecture, write_architecture
from tests.integration.test_headwise import relative_error, tokens_for

Logits = npt.NDArray[np.float32]

# Why the headwise store refuses, by kind; what is not here, it serves.
REFUSALS = {
    "windowed": "sliding-window layers",
    "shared keys": "sliding-window layers",
    "hybrid": "recurrent layers|sliding-window layers",
    "recurrent": "recurrent layers",
    "latent": "multi-head latent attention",
    "latent hybrid": "recurrent layers",
    "ALiBi": "ALiBi",
    "sparse": "recurrent layers|sliding-window layers|latent attention|not the KV cache",
    "unfused": "not one flash attention node per layer",
    "diffusion": "diffusion model",
}
ALL = [(kind, model) for kind, models in ARCHITECTURES.items() for model in models]
SERVED = [model for kind, model in ALL if kind not in REFUSALS]
CACHED = [model for kind, model in ALL if kind != "diffusion"]

every_model = pytest.mark.parametrize(("kind", "model"), ALL, ids=[model.name for _, model in ALL])


@pytest.fixture
def path(model: Architecture, tmp_path: Path) -> Path:
    file = tmp_path / f"{model.name}.gguf"
    write_architecture(file, model)
    return file


def stock(path: Path, *, flash: bool = False) -> StockSession:
    return StockSession(path, n_ctx=256, n_threads=1, flash=flash)


def read(session: StockSession | Session, tokens: list[int], step: int) -> Logits:
    """Logits of tokens that are read a few at a time."""
    parts = [tokens[first : first + step] for first in range(0, len(tokens), step)]
    return np.concatenate([session.decode(part, all_logits=True) for part in parts])


def greedy(session: StockSession | Session, prompt: list[int], n_tokens: int) -> list[int]:
    text = [int(session.decode(prompt)[-1].argmax())]
    while len(text) < n_tokens:
        text.append(int(session.decode(text[-1:])[-1].argmax()))
    return text


def test_names_tell_the_models_apart() -> None:
    names = [model.name for _, model in ALL]
    assert len(set(names)) == len(names)


@every_model
def test_stock_llama_cpp_decodes_it(kind: str, model: Architecture, path: Path) -> None:
    """The weights make sense: finite logits that hang on the text, however it is read."""
    tokens = tokens_for(48)
    other = [tokens[0], tokens[1] ^ 1, *tokens[2:]]
    session = stock(path)
    logits = read(session, tokens, 48)
    session.reset()
    changed = read(session, other, 48)
    session.reset()
    one_by_one = read(session, tokens, 1)
    session.close()
    fused_session = stock(path, flash=True)
    fused = read(fused_session, tokens, 48)
    fused_session.close()
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5
    assert relative_error(changed[20:], logits[20:]) > 0.01
    assert relative_error(fused, logits) < 2 * model.rounding
    if kind != "diffusion":
        assert relative_error(one_by_one, logits) < model.rounding


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.name)
def test_headwise_gives_the_logits_and_the_text_of_stock(model: Architecture, path: Path) -> None:
    tokens = tokens_for(130)
    session = stock(path)
    expected = read(session, tokens, 130)
    session.reset()
    text = greedy(session, tokens[:30], 64)
    session.close()
    for n_ubatch in (7, 64):
        with Session(
            path, n_ctx=256, store="headwise", kv_type="f16", n_ubatch=n_ubatch, n_threads=1
        ) as ours:
            assert relative_error(read(ours, tokens, 130), expected) < model.rounding
            ours.reset()
            assert greedy(ours, tokens[:30], 64) == text
    with Session(path, store="headwise", n_ctx=256, kv_type="f16", n_threads=1) as ours:
        assert relative_error(read(ours, tokens, 1), expected) < model.rounding


@pytest.mark.parametrize(
    ("kind", "model"),
    [(kind, model) for kind, model in ALL if kind in REFUSALS],
    ids=lambda case: case.name if isinstance(case, Architecture) else "",
)
def test_headwise_refuses_by_name(kind: str, model: Architecture, path: Path) -> None:  # noqa: ARG001
    with pytest.raises(UnsupportedModelError, match=REFUSALS[kind]):
        Session(path, store="headwise", n_ctx=256, kv_type="f16", n_threads=1)


@pytest.mark.parametrize("model", CACHED, ids=lambda model: model.name)
def test_flat_gives_the_logits_of_stock(model: Architecture, path: Path) -> None:
    tokens = tokens_for(90)
    session = stock(path, flash=True)
    expected = read(session, tokens, 90)
    session.close()
    with Session(path, n_ctx=256, kv_type="f16", store="flat", n_ubatch=64, n_threads=1) as ours:
        assert relative_error(read(ours, tokens, 90), expected) < model.rounding
