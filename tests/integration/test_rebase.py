"""Sessions continue beyond the trained context, or say why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import ContextError, Session, SessionFileError, SettingsError
from entropykv.model.shipped import DEMOS
from tests.support.logits import Logits, relative_error, tokens_for
from tests.support.tiny_models import write_bitnet, write_gpt2, write_llama
from tests.support.tiny_writer import TinyRope
from training.facts import STOP, STOP_LINE, Writer

TRAINED = 256


SMALL: dict[str, Any] = {"n_ubatch": 32, "n_threads": 1}
FACTORS = tuple(float(f) for f in np.linspace(1.0, 8.0, 16))
YARN = TinyRope(yarn_factor=4.0, n_ctx_orig=64)


MODELS: dict[str, Callable[[Path, int], None]] = {
    "llama": lambda path, n: write_llama(path, head_dim=32, n_ctx_train=n, weight_type="F32"),
    "bitnet": lambda path, n: write_bitnet(path, head_dim=32, n_ctx_train=n, weight_type="F32"),
    "partial": lambda path, n: write_bitnet(
        path, head_dim=32, n_ctx_train=n, weight_type="F32", rope=TinyRope(n_dims=16)
    ),
    "factors": lambda path, n: write_llama(
        path, head_dim=32, n_ctx_train=n, weight_type="F32", rope=TinyRope(factors=FACTORS)
    ),
    "yarn": lambda path, n: write_llama(
        path, head_dim=32, n_ctx_train=n, weight_type="F32", rope=YARN
    ),
    "wide": lambda path, n: write_llama(
        path, n_head=2, n_head_kv=1, head_dim=64, n_ctx_train=n, weight_type="F32"
    ),
    "smollm3": lambda path, n: write_llama(
        path, head_dim=32, n_layer=4, n_ctx_train=n, weight_type="F32", architecture="smollm3"
    ),
}


# Models that the flat store cannot shift: llama.cpp scales keys of YaRN each time it rotates them,
# and rotates keys that have no RoPE.
UNFIT_FOR_FLAT = ("yarn", "smollm3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a tiny model with equal weights for every trained context."""
    directory = tmp_path_factory.mktemp("rebase")

    def write(name: str, n_ctx_train: int = TRAINED) -> Path:
        path = directory / f"{name}-{n_ctx_train}.gguf"
        if not path.exists():
            MODELS[name](path, n_ctx_train)
        return path

    return write


def keys_at(path: Path, tokens: list[int], position: int, move_to: int) -> npt.NDArray[np.float32]:
    """Return K of layers and heads, read at a position and moved to another: (heads, n, dim)."""
    with Session(path, n_ctx=TRAINED, kv_type="f16", n_threads=1, n_sinks=0) as session:
        session._slot.text.position = position
        session.decode(tokens)
        store = session._slot.store
        ropes = [node.rope for node in store.context.hook.nodes]
        store.core.rebase(ropes, 0, 0, position - move_to)
        heads = range(store.layers[0].n_head_kv)
        return np.stack(
            [store.core.rows(layer, h)[2] for layer in range(len(ropes)) for h in heads]
        )


@pytest.mark.parametrize("name", MODELS)
def test_moved_keys_are_those_that_llama_cpp_computes_there(
    name: str, model: Callable[..., Path]
) -> None:
    path, tokens = model(name), tokens_for(40)
    moved = keys_at(path, tokens, 200, 11)
    expected = keys_at(path, tokens, 11, 11)
    # Moved keys were rounded to f16 once more, and so were the keys from which their hidden states
    # come.
    np.testing.assert_allclose(moved, expected, rtol=0, atol=4e-3 * np.abs(expected).max())
    assert np.abs(keys_at(path, tokens, 200, 200) - expected).max() > 0.5


def read_in_steps(session: Session, tokens: list[int]) -> Logits:
    """Read half of a prompt in micro-batches, and the rest as single tokens; return all logits."""
    half = len(tokens) // 2
    rows = [session.decode(tokens[:half], all_logits=True)]
    return np.concatenate(rows + [session.decode([token]) for token in tokens[half:]])


@pytest.mark.parametrize(
    ("name", "store"),
    [(name, "headwise") for name in MODELS]
    + [(name, "flat") for name in MODELS if name not in UNFIT_FOR_FLAT],
)
def test_nothing_is_noticed_within_the_exact_distances(
    name: str, store: str, model: Callable[..., Path]
) -> None:
    """Where a small budget keeps entries only at distances that a shift leaves unchanged, and
    without sinks, the logits are those of a model trained for longer texts, up to rounding.
    """
    tokens = tokens_for(600)
    logits = []
    for trained in (TRAINED, 4096):
        with Session(
            model(name, trained),
            n_ctx=1024,
            kv_budget=96,
            policy="streaming",
            store=store,
            kv_type="f16",
            n_threads=1,
            n_ubatch=32,
            n_sinks=0,
        ) as session:
            logits.append(read_in_steps(session, tokens))
            assert session.stats().rebases == (0 if trained > TRAINED else 6)
    assert relative_error(logits[0], logits[1]) < 2e-3
    # The logits differ slightly, which shows that keys were moved.
    assert relative_error(logits[0][TRAINED:], logits[1][TRAINED:]) > 1e-7


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [(name, "f16") for name in MODELS if name not in UNFIT_FOR_FLAT] + [("wide", "q8_0")],
)
def test_both_stores_agree_with_sinks(name: str, kv_type: str, model: Callable[..., Path]) -> None:
    tokens = tokens_for(500)
    logits = []
    for store in ("headwise", "flat"):
        with Session(
            model(name),
            n_ctx=1024,
            kv_budget=64,
            policy="streaming",
            store=store,
            kv_type=kv_type,
            n_threads=1,
            n_ubatch=32,
        ) as session:
            logits.append(read_in_steps(session, tokens))
            assert session.cache.entries(0, 0).tolist()[:4] == [0, 1, 2, 3]
            assert session.cache.entries(0, 0)[-1] == 499
            assert session.stats().rebases == 4
    assert relative_error(logits[0], logits[1]) < (5e-3 if kv_type == "f16" else 8e-2)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_going_back_gives_the_session_that_never_went_on(
    kv_type: str, model: Callable[..., Path]
) -> None:
    """After a rollback, RoPE sees the distances that entries have in the text again, as if the text
    had never gone on.
    """
    tokens = tokens_for(900)
    with Session(model("llama"), n_ctx=1024, kv_type=kv_type, n_threads=1) as session:
        session.decode(tokens)
        assert session._slot.store.shift >= 900 - TRAINED
        session.text.truncate(200)
        ours = session.decode(tokens[:40], all_logits=True)
        assert session._slot.store.shift == 0
    with Session(model("llama"), n_ctx=1024, kv_type=kv_type, n_threads=1) as session:
        session.decode(tokens[:200])
        expected = session.decode(tokens[:40], all_logits=True)
    assert relative_error(ours, expected) < (2e-3 if kv_type == "f16" else 8e-2)


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_positions_are_those_of_the_text(store: str, model: Callable[..., Path]) -> None:
    with Session(
        model("llama"), n_ctx=4096, kv_budget=128, store=store, kv_type="f16", **SMALL
    ) as session:
        session.decode(tokens_for(2000))
        list(session.generate(tokens_for(5), max_tokens=50))
        kept = session.cache.entries(0, 0)
        assert kept[:4].tolist() == [0, 1, 2, 3]
        assert kept[-1] == session.position - 1 > 2000
        assert kept[kept >= session.position - 32].size == 32
        stats = session.stats()
        assert stats.rebases == session._slot.store.shift // (TRAINED // 4) > 20
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        session.reset()
        assert session._slot.store.shift == 0
        first = session.decode(tokens_for(20))
    with Session(model("llama"), n_ctx=64, store=store, kv_type="f16", n_threads=1) as session:
        assert relative_error(first, session.decode(tokens_for(20))) < 2e-3


def test_flat_drops_what_headwise_clamps(model: Callable[..., Path]) -> None:
    kept = {}
    for store in ("headwise", "flat"):
        with Session(
            model("llama"), n_ctx=512, policy="streaming", store=store, kv_type="f16", **SMALL
        ) as session:
            session.decode(tokens_for(500))
            kept[store] = session.cache.entries(1, 1).tolist()
            shift = session._slot.store.shift
            assert session.stats().entries_kept == len(kept[store]) * 4
    assert kept["headwise"] == list(range(500))
    assert kept["flat"] == [0, 1, 2, 3, *range(4 + shift, 500)]


def test_the_shipped_model_answers_far_beyond_its_trained_context() -> None:
    writer = Writer("beyond")
    right: list[bool] = []
    with Session(DEMOS["bitnet"].path, n_ctx=8192, kv_budget=1024, n_threads=1) as session:
        trained = session.model.geometry.n_ctx_train
        while session.position < 3 * trained:
            words, facts = writer.test_document(400, 4)
            start = session.position
            session.decode(session.tokenize("".join([*words[1:-1], STOP_LINE]), add_bos=start == 0))
            end = session.position
            for fact in facts:
                question = session.tokenize("".join(fact.question()), add_bos=False)
                answer = session.detokenize(list(session.generate(question, max_tokens=12)))
                right.append(answer == "".join([*fact.statement(), STOP]))
                session.text.truncate(end)
        assert session.stats().rebases >= 4
    late = right[len(right) // 2 :]
    assert sum(late) / len(late) >= 0.7


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_a_saved_session_knows_how_far_it_was_moved(
    store: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {**SMALL, "n_ctx": 4 * TRAINED, "kv_budget": 96}
    policy = "adaptive" if store == "headwise" else "recency"
    # A policy that predicts would learn from both texts here, but only from the second one in a
    # session that was loaded.
    options |= {"store": store, "kv_type": "f16", "policy": policy}
    with Session(model("llama"), **options) as session:
        session.decode(tokens_for(2 * TRAINED + 40))
        assert session.stats().rebases > 0
        session.files.save(tmp_path / "far.ekv")
        expected = session.decode(tokens_for(TRAINED, seed=5), all_logits=True)
    with Session(model("llama"), **options) as session:
        session.files.load(tmp_path / "far.ekv")
        found = session.decode(tokens_for(TRAINED, seed=5), all_logits=True)
    np.testing.assert_array_equal(found, expected)
    with (
        Session(model("llama"), **{**options, "n_sinks": 2}) as session,
        pytest.raises(SessionFileError, match="use --sinks 4"),
    ):
        session.files.load(tmp_path / "far.ekv")


def write_unmovable(name: str, path: Path) -> None:
    if name == "gpt2":
        write_gpt2(path, n_ctx_train=TRAINED)
    elif name in MODELS:
        MODELS[name](path, TRAINED)
    elif name == "quantised":
        MODELS["llama"](path, TRAINED)
    else:
        write_llama(path, head_dim=32, n_ctx_train=TRAINED, architecture="hunyuan-dense")


@pytest.mark.parametrize(
    ("name", "store", "kv_type", "why"),
    [
        ("hunyuan-dense", "headwise", "f16", "its keys are changed after their rotation"),
        ("gpt2", "headwise", "f16", "its position embeddings are learned"),
        ("gpt2", "flat", "f16", "its position embeddings are learned"),
        ("hunyuan-dense", "flat", "f16", "its keys are changed after their rotation"),
        ("yarn", "flat", "f16", "scale its keys again"),
        ("smollm3", "flat", "f16", "rotate keys that have no position"),
        ("quantised", "flat", "q8_0", "cannot rotate quantised keys"),
    ],
)
def test_a_model_that_cannot_go_on_says_so_at_the_limit(
    name: str, store: str, kv_type: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_unmovable(name, path)
    tokens = tokens_for(TRAINED)
    with Session(path, n_ctx=512, kv_budget=96, store=store, kv_type=kv_type, **SMALL) as session:
        session.decode(tokens)
        with pytest.raises(ContextError, match=f"tiny .*{TRAINED} that the model.*{why}"):
            session.decode([5])
        assert session.position == TRAINED
        session.text.truncate(TRAINED - 1)
        ours = session.decode(tokens[-1:])
    with Session(
        path, n_ctx=TRAINED, kv_budget=96, store=store, kv_type=kv_type, **SMALL
    ) as session:
        session.decode(tokens)
        session.text.truncate(TRAINED - 1)
        assert relative_error(ours, session.decode(tokens[-1:])) < 2e-3


@pytest.mark.parametrize(
    ("name", "why"), [("gpt2", "embeddings are learned"), ("hunyuan-dense", "keys are changed")]
)
def test_predicted_attention_needs_keys_that_can_be_moved(
    name: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_unmovable(name, path)
    with pytest.raises(SettingsError, match=f"uniform:predicted predicts .*{why}.*use measure"):
        Session(path, n_ctx=64, policy="uniform:predicted", **SMALL)


def test_frequencies_for_short_contexts_end_where_they_do(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rope = TinyRope(factors=FACTORS, short_factors=True, n_ctx_orig=512)
    write_llama(path, head_dim=32, n_ctx_train=4096, rope=rope)
    with Session(path, n_ctx=2048, kv_budget=64, n_ubatch=64, n_threads=1) as session:
        session.decode(tokens_for(512))
        assert session.stats().rebases == 0
        session.decode(tokens_for(64))
        assert session.stats().rebases == 1
        assert session._slot.store.shift == 128
