"""Arguments of EntropyLlama reach the context, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv import (
    BudgetError,
    ContextError,
    EntropyLlama,
    ModelFileError,
    SettingsError,
    attach,
    detach,
)
from tests.support.llamas import QUIET, content
from tests.support.logits import tokens_for


def test_rope_arguments_reach_the_new_context(tiny_llama: Path, store: str) -> None:
    tokens = tokens_for(60)
    changed: dict[str, Any] = {"rope_freq_base": 500.0, "rope_freq_scale": 0.5}
    yarn: dict[str, Any] = {
        "rope_scaling_type": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
        "rope_freq_scale": 0.25,
        "yarn_orig_ctx": 64,
        "yarn_ext_factor": 1.0,
        "yarn_beta_fast": 16.0,
    }
    logits = {}
    for name, arguments in (("plain", {}), ("changed", changed), ("yarn", yarn)):
        for kind, more in ((Llama, {}), (EntropyLlama, {"kv_type": "f16", "store": store})):
            llm = kind(str(tiny_llama), n_ctx=128, logits_all=True, **QUIET, **arguments, **more)
            llm.eval(tokens)
            logits[name, kind] = llm.scores[:60].copy()
            llm.close()
        spread = logits[name, Llama].std()
        assert np.abs(logits[name, Llama] - logits[name, EntropyLlama]).max() < 2e-2 * spread
        if name != "plain":
            assert np.abs(logits["plain", Llama] - logits[name, Llama]).max() > 0.1 * spread


def write_adapter(path: Path, n_embd: int, rank: int = 4) -> None:
    """Write a LoRA adapter for attn_output of the first layer."""
    random = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, shape in (("lora_a", (rank, n_embd)), ("lora_b", (n_embd, rank))):
        weights = random.standard_normal(shape).astype(np.float32) / 4
        writer.add_tensor(
            f"blk.0.attn_output.weight.{name}", weights, raw_dtype=GGMLQuantizationType.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_lora_adapter_stays_in_force(tiny_llama: Path, tmp_path: Path, store: str) -> None:
    """An adapter is used in the context with a budget, and in the one that detach() makes."""
    write_adapter(tmp_path / "lora.gguf", n_embd=192)
    lora: dict[str, Any] = {"lora_path": str(tmp_path / "lora.gguf"), "lora_scale": 0.7}
    tokens = tokens_for(30)
    rows = []

    def row(llm: Llama) -> None:
        llm.reset()
        llm.eval(tokens)
        rows.append(llm.scores[:30].copy())

    plain = Llama(str(tiny_llama), n_ctx=64, logits_all=True, **QUIET)
    row(plain)
    llm = Llama(str(tiny_llama), n_ctx=64, logits_all=True, **QUIET, **lora)
    row(llm)
    row(attach(llm, kv_type="f16", store=store))
    row(detach(llm))  # type: ignore[arg-type]
    without, stock, ours, again = rows
    assert np.abs(without - stock).max() > 0.5
    assert np.abs(ours - stock).max() < 2e-2 * stock.std()
    np.testing.assert_array_equal(again, stock)
    plain.close()
    llm.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embedding": True}, "embedding=True .* use llama_cpp.Llama"),
        ({"vocab_only": True}, "vocab_only=True"),
        ({"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}, "attention_type"),
        (
            {"type_k": llama_cpp.GGML_TYPE_F16, "kv_type": "q8_0"},
            "type_k is 1 but kv_type is 'q8_0'",
        ),
        ({"type_k": 1, "type_v": 8}, "K in f16 and V in q8_0: no store has these types"),
        ({"type_v": 20, "kv_type": "f16"}, "type_v is 20 but kv_type is 'f16'"),
        ({"type_v": llama_cpp.GGML_TYPE_Q4_0, "kv_type": "f16"}, "type_v is 2 .* leave type_v out"),
        ({"kv_bugdet": 0.2}, "kv_bugdet is no argument"),
        ({"kv_type": "q4_0"}, "kv_type cannot be 'q4_0'"),
        ({"policy": "best"}, "policy cannot be 'best'"),
        ({"n_ctx": -1}, "n_ctx cannot be -1"),
        ({"n_batch": 0}, "n_batch cannot be 0"),
        ({"n_ubatch": 0}, "n_ubatch cannot be 0"),
        ({"draft_model": LlamaPromptLookupDecoding(), "spec_type": "none"}, "spec_draft_model"),
    ],
)
def test_refuses_what_cannot_work(
    tiny_llama: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        EntropyLlama(str(tiny_llama), **{**QUIET, "n_ctx": 64, **arguments})


def test_refuses_budgets_and_files_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="smallest budget"):
        EntropyLlama(str(tiny_llama), n_ctx=64, kv_budget=3, **QUIET)
    with pytest.raises(ModelFileError, match="missing"):
        EntropyLlama(str(tmp_path / "missing.gguf"), **QUIET)
    with pytest.raises(ModelFileError, match=r"no\.gguf: .* LoRA"):
        EntropyLlama(str(tiny_llama), n_ctx=64, lora_path=str(tmp_path / "no.gguf"), **QUIET)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_llama.read_bytes()[:5000])
    with pytest.raises(ModelFileError, match=r"damaged\.gguf"):
        EntropyLlama(str(damaged), **QUIET)


def test_layers_may_be_offloaded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, n_gpu_layers=-1 gives the headwise store."""
    for supported in (False, True):
        monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda value=supported: value)
        llm = EntropyLlama(str(tiny_llama), n_ctx=64, n_gpu_layers=-1, **QUIET)
        assert llm.kv_stats().store == "headwise"
        llm.close()


def test_a_fallback_is_told(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_model_has_encoder", lambda _: True)
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, **{**QUIET, "verbose": True})
    assert llm.kv_stats().store == "flat"
    assert "it has an encoder" in capfd.readouterr().err
    llm.close()


def test_agreeing_types_are_accepted(tiny_llama: Path) -> None:
    half, int8, int4 = (
        llama_cpp.GGML_TYPE_F16,
        llama_cpp.GGML_TYPE_Q8_0,
        llama_cpp.GGML_TYPE_IQ4_NL,
    )
    for name, of_keys, of_values in (
        ("q8_0", int8, int8),
        ("f16", half, half),
        ("q8_0/iq4_nl", int8, int4),
        ("q8_0/iq4_nl", None, int4),
        ("q8_0", int8, None),
    ):
        llm = EntropyLlama(str(tiny_llama), n_ctx=64, type_k=of_keys, type_v=of_values, **QUIET)
        assert llm.kv_stats().kv_type == name
        llm.close()


def test_n_ctx_is_the_logical_context(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=0, kv_budget=64, n_ubatch=32, **QUIET)
    assert llm.n_ctx() == 2048
    assert len(llm.input_ids) == 2048
    llm.eval(tokens_for(700))
    assert llm.n_tokens == 700
    stats = llm.kv_stats()
    assert stats.n_ctx == 2048
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert stats.entries_kept <= 64 * 6
    llm.close()
    llm = EntropyLlama(str(tiny_llama), n_ctx=100, **QUIET)
    with pytest.raises(
        ContextError, match=r"Requested tokens \(100\) exceed context window of 100"
    ):
        llm(tokens_for(100))
    with pytest.raises(ContextError, match="n_ctx"):
        llm.eval(tokens_for(101))
    reply = llm(tokens_for(90), max_tokens=None, temperature=0.0, logit_bias={2: -1e9})
    assert reply["usage"]["completion_tokens"] == 10
    assert reply["choices"][0]["finish_reason"] == "length"
    llm.close()


def test_a_draft_model_leaves_the_text_as_it_is(tiny_llama: Path, store: str) -> None:
    prompt = "the and the and the and the "
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
    plain = EntropyLlama(str(tiny_llama), n_ctx=128, kv_type="f16", store=store, **QUIET)
    draft = EntropyLlama(
        str(tiny_llama),
        n_ctx=128,
        kv_type="f16",
        store=store,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=3),
        **QUIET,
    )
    expected = content(plain(prompt, **options))
    assert content(draft(prompt, **options)) == expected
    plain.close()
    draft.close()


def test_embeddings_are_refused(pair: tuple[EntropyLlama, Llama]) -> None:
    with pytest.raises(SettingsError, match=r"embed\(\)"):
        pair[0].embed("text")
    with pytest.raises(SettingsError, match="create_embedding"):
        pair[0].create_embedding("text")


@pytest.mark.parametrize("name", ["kv_cache_seq_cp", "kv_cache_seq_keep", "kv_cache_seq_shift"])
def test_other_sequences_are_refused(pair: tuple[EntropyLlama, Llama], name: str) -> None:
    with pytest.raises(SettingsError, match="one sequence"):
        getattr(pair[0]._ctx, name)(0, 1, 0, 1)
