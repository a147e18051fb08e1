"""In graphs that llama.cpp builds with SwiGLU, squared ReLU is computed instead; a forward pass in
numpy is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from entropykv import Session, UnsupportedModelError, _core
from entropykv.llamacpp.context import let_hook_change
from entropykv.llamacpp.model import Model
from entropykv.store.step import MicroBatch
from tests.support.command import assert_refused, entropykv
from tests.support.logits import Logits, relative_error, tokens_for
from tests.support.model_reference import ModelReference
from tests.support.tiny_models import write_bitnet, write_gemma, write_llama

WRITERS: dict[str, Callable[..., None]] = {"bitnet": write_bitnet, "llama": write_llama}
TOKENS = tokens_for(150)
TOLERANCE = 6e-3  # An f16 cache differed by up to 4e-3 for both activations.
ROW_TOLERANCE = 3e-2  # A single row differed by up to 1.3e-2.
OTHER_ACTIVATION = 0.3  # Measured: SiLU instead of squared ReLU differs by 0.53 and more.


@pytest.fixture(scope="module", params=["bitnet", "llama"])
def relu2_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    shape = {"n_layer": 3, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff": 96}
    WRITERS[request.param](path, **shape, weight_type="F32", activation="relu2")
    return path


@pytest.fixture(scope="module")
def expected(relu2_model: Path) -> Logits:
    return ModelReference(relu2_model, "relu2").logits(TOKENS).astype(np.float32)


def test_the_numpy_forward_pass_is_that_of_stock_for_silu(tmp_path: Path) -> None:
    for architecture, write in WRITERS.items():
        path = tmp_path / f"{architecture}.gguf"
        write(path, weight_type="F32", activation="silu")
        with Session(path, n_ctx=256, kv_type="f16", n_threads=2) as session:
            ours = session.decode(TOKENS, all_logits=True)
        reference = ModelReference(path, "silu").logits(TOKENS).astype(np.float32)
        assert relative_error(ours, reference) < TOLERANCE


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_relu2_is_computed_in_prompt_and_decode(
    relu2_model: Path, expected: Logits, store: str, n_threads: int
) -> None:
    with Session(
        relu2_model, n_ctx=256, kv_type="f16", store=store, n_ubatch=32, n_threads=n_threads
    ) as session:
        rows = [session.decode(TOKENS[:80], all_logits=True)]
        rows += [session.decode([token]) for token in TOKENS[80:]]
        session.reset()
        last = session.decode(TOKENS)  # Micro-batches without logits have an empty last layer.
    assert relative_error(np.concatenate(rows), expected) < TOLERANCE
    assert relative_error(last, expected[-1:]) < ROW_TOLERANCE
    silu = ModelReference(relu2_model, "silu").logits(TOKENS).astype(np.float32)
    assert relative_error(expected, silu) > OTHER_ACTIVATION


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_relu2_with_a_q8_0_cache_and_a_larger_context(
    relu2_model: Path, expected: Logits, store: str
) -> None:
    with Session(relu2_model, n_ctx=600, kv_budget=80, store=store, n_ubatch=64) as session:
        session.decode(TOKENS[:40])
        session.cache.resize(500)  # The flat store moves to another context.
        ours = session.decode(TOKENS[40:], all_logits=True)
    assert relative_error(ours, expected[40:]) < 5e-2


@pytest.mark.parametrize("weight_type", ["F16", "Q8_0", "Q4_0"])
def test_weight_types_do_not_matter(weight_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_bitnet(path, weight_type=weight_type, activation="relu2")
    logits = {}
    for store in ("headwise", "flat"):
        with Session(path, n_ctx=256, kv_type="f16", store=store, n_threads=2) as session:
            logits[store] = session.decode(TOKENS, all_logits=True)
    assert relative_error(logits["headwise"], logits["flat"]) < 5e-2


@pytest.mark.parametrize("store", ["headwise", "flat", "auto"])
def test_a_graph_without_such_gates_is_refused(store: str, tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    write_gemma(path, activation="relu2")
    with Session(path, n_ctx=64, store=store) as session:
        with pytest.raises(UnsupportedModelError, match=r"tiny gemma: .* only 0 of 2 layers have"):
            session.decode([5])
        session.reset()
        with pytest.raises(UnsupportedModelError, match="convert the model again"):
            session.decode([5, 6])
    assert_refused(entropykv("run", "-m", path, "-p", "the", "--store", store), "squared ReLU")


def test_offloaded_layers_are_refused(relu2_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    for store in ("headwise", "flat", "auto"):
        with pytest.raises(UnsupportedModelError, match="no --n-gpu-layers"):
            Session(relu2_model, n_ctx=64, store=store, n_gpu_layers=1)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_bitnet(path, activation="gelu")
    for command in (("run", "-p", "the"), ("plan",)):
        result = entropykv(command[0], "-m", path, *command[1:])
        assert_refused(result, "odd.gguf", "'gelu'", "silu, relu2", "convert the model again")


class HookedContext:
    """Hold a llama_context with an f32 cache, under a WeightHook."""

    def __init__(self, path: Path, n_layers: int, n_threads: int = 2) -> None:
        self.hook = _core.WeightHook(n_layers)
        self.model = Model(path, n_gpu_layers=0, verbose=False)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = 256, 64, 32
        parameters.n_threads = parameters.n_threads_batch = n_threads
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        let_hook_change(parameters, self.hook)
        self.context = self.model.new_context(parameters)
        self.batch = MicroBatch(64, self.model.n_vocab)
        self.position = 0

    def decode(self, tokens: list[int]) -> Logits:
        self.hook.begin_step()
        n_tokens = len(tokens)
        logits = self.batch.decode(self.context, tokens, self.position, n_rows=n_tokens)
        self.position += n_tokens
        assert logits is not None
        return logits

    def __enter__(self) -> HookedContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.batch.close()
        llama_cpp.llama_free(self.context)
        self.model.close()


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_the_op_is_exact(relu2_model: Path, expected: Logits, n_threads: int) -> None:
    """Logits are those of numpy in micro-batches of several sizes, and in reused graphs: a single
    token reuses the graph of the one before.
    """
    with HookedContext(relu2_model, 3, n_threads) as hooked:
        rows = []
        for step in (32, 7, *[1] * 60, 31, *[1] * 20):
            rows.append(hooked.decode(TOKENS[hooked.position : hooked.position + step]))
            hooked.hook.check_step()
    assert relative_error(np.concatenate(rows), expected) < 1e-5


@pytest.mark.parametrize(
    ("n_layers", "message"),
    [
        (4, "only 3 of 4 layers have"),
        (2, r"only 2 of 2 layers .*\(one is of a layer that the file does not declare\)"),
    ],
)
def test_every_layer_counts(relu2_model: Path, n_layers: int, message: str) -> None:
    with HookedContext(relu2_model, n_layers) as hooked:
        for token in TOKENS[:3]:
            hooked.decode([token])
            with pytest.raises(RuntimeError, match=message):
                hooked.hook.check_step()


def test_every_step_counts_on_its_own(relu2_model: Path) -> None:
    with HookedContext(relu2_model, 3) as hooked:
        hooked.decode([5])
        hooked.hook.check_step()
        hooked.hook.begin_step()
        with pytest.raises(RuntimeError, match="only 0 of 3"):
            hooked.hook.check_step()
        hooked.decode(TOKENS[:60])  # Two micro-batches: every gate is changed twice.
        with pytest.raises(RuntimeError, match="only 0 of 3"):
            hooked.hook.check_step()
