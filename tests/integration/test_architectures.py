"""Every architecture that llama.cpp decodes with: the logits of stock, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import EntropyKVError, ModelFileError, Session, UnsupportedModelError
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


def next_logits(session: StockSession | Session, tokens: list[int]) -> Logits:
    """After all tokens: cogvlm's graph gives the first row where only the last is asked for."""
    logits: Logits = session.decode(tokens, all_logits=True)[-1]
    return logits


def greedy(session: StockSession, prompt: list[int], n_tokens: int) -> tuple[list[int], Logits]:
    """A text, and the logits that each of its tokens was chosen by."""
    rows = [next_logits(session, prompt)]
    text = [int(rows[0].argmax())]
    while len(text) < n_tokens:
        rows.append(next_logits(session, text[-1:]))
        text.append(int(rows[-1].argmax()))
    return text, np.stack(rows)


def decided(logits: Logits, rounding: float) -> npt.NDArray[np.bool_]:
    """Rows whose largest value is so by more than rounding."""
    best = np.sort(logits, axis=1)[:, -2:]
    choices: npt.NDArray[np.bool_] = best[:, 1] - best[:, 0] > 4 * rounding * logits.std()
    return choices


def test_names_tell_the_models_apart() -> None:
    names = [model.name for _, model in ALL]
    assert len(set(names)) == len(names)


def test_the_same_description_gives_the_same_bytes(tmp_path: Path) -> None:
    files = tmp_path / "first.gguf", tmp_path / "second.gguf"
    for file in files:
        write_architecture(file, ARCHITECTURES["hybrid"][0])
    assert files[0].read_bytes() == files[1].read_bytes()


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
    assert relative_error(changed[20:], logits[20:]) > 2 * model.rounding
    assert relative_error(fused, logits) < 2 * model.rounding
    if kind != "diffusion":
        assert relative_error(one_by_one, logits) < model.rounding


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.name)
def test_headwise_gives_the_logits_and_the_text_of_stock(model: Architecture, path: Path) -> None:
    tokens = tokens_for(130)
    session = stock(path)
    expected = read(session, tokens, 130)
    session.reset()
    text, rows = greedy(session, tokens[:30], 64)
    session.close()
    sure = decided(rows, model.rounding)
    assert sure.mean() > 0.9
    for n_ubatch in (7, 64):
        with Session(
            path, n_ctx=256, store="headwise", kv_type="f16", n_ubatch=n_ubatch, n_threads=1
        ) as ours:
            assert relative_error(read(ours, tokens, 130), expected) < model.rounding
            ours.reset()
            chosen = [next_logits(ours, tokens[:30]).argmax()]
            chosen += [next_logits(ours, [token]).argmax() for token in text[:-1]]
            assert np.array_equal(np.array(chosen)[sure], np.array(text)[sure])
            ours.reset()
            assert relative_error(read(ours, tokens, 1), expected) < model.rounding


@every_model
def test_auto_takes_headwise_or_says_why_not(kind: str, model: Architecture, path: Path) -> None:  # noqa: ARG001
    with Session(path, n_ctx=256, kv_type="f16", n_threads=1) as session:
        store, fallback = session.stats().store, session.fallback
    if kind not in REFUSALS:
        assert (store, fallback) == ("headwise", None)
        return
    assert store == "flat"
    with pytest.raises(UnsupportedModelError, match=REFUSALS[kind]) as refusal:
        Session(path, n_ctx=256, store="headwise", kv_type="f16", n_threads=1)
    assert str(refusal.value) == fallback


@pytest.mark.parametrize("model", CACHED, ids=lambda model: model.name)
def test_flat_gives_the_logits_of_stock(model: Architecture, path: Path) -> None:
    tokens = tokens_for(90)
    session = stock(path, flash=True)
    expected = read(session, tokens, 90)
    session.close()
    with Session(path, n_ctx=256, kv_type="f16", store="flat", n_ubatch=64, n_threads=1) as ours:
        assert relative_error(read(ours, tokens, 90), expected) < model.rounding


def some(kinds: tuple[str, ...]) -> pytest.MarkDecorator:
    models = [model for kind, model in ALL if kind in kinds]
    return pytest.mark.parametrize("model", models, ids=lambda model: model.name)


@pytest.mark.xfail(strict=True, reason="flat reads each micro-batch as a text of its own")
@some(("diffusion",))
def test_flat_refuses_models_without_a_cache(model: Architecture, path: Path) -> None:  # noqa: ARG001
    with pytest.raises(UnsupportedModelError, match="diffusion model"):
        Session(path, n_ctx=256, store="flat", kv_type="f16", n_threads=1)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="not a typed error")
@some(("hybrid", "latent hybrid", "recurrent"))
def test_recurrent_layers_cannot_go_back(model: Architecture, path: Path) -> None:  # noqa: ARG001
    with Session(path, n_ctx=256, store="flat", kv_type="f16", n_threads=1) as session:
        session.decode(tokens_for(60))
        with pytest.raises(EntropyKVError, match="reset"):
            session.truncate(40)


@pytest.mark.xfail(strict=True, raises=ModelFileError, reason="llama.cpp's q8_0 has blocks of 32")
@pytest.mark.parametrize(
    "model",
    [model for _, model in ALL if model.name in ("llama-80", "mimo2", "jamba")],
    ids=lambda model: model.name,
)
def test_flat_has_a_type_for_heads_of_any_size(model: Architecture, path: Path) -> None:  # noqa: ARG001
    with Session(path, n_ctx=256, store="flat", n_threads=1) as session:
        session.decode(tokens_for(60))
