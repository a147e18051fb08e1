"""EntropyLlama in the place of llama_cpp.Llama: the same calls, the same answers."""

from __future__ import annotations

import gc
import json
import pickle
import re
import runpy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList
from llama_cpp.llama_chat_format import MTMDChatHandler
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv import (
    BudgetError,
    ContextError,
    EntropyKVError,
    EntropyLlama,
    EvictionEvent,
    ModelFileError,
    Session,
    SettingsError,
    attach,
    detach,
)
from entropykv.model import shipped
from tests.support.llamas import QUIET, STORES, answer, content
from tests.support.logits import tokens_for
from tests.support.tiny_models import write_llama

PROMPT = "the winding road to the land of "
GRAMMAR = 'root ::= [a-z]{3} " " [0-9]{2}'
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def penalise_e(_: Any, scores: Any) -> Any:
    scores[scores.argmax()] -= 3.0
    return scores


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "another seed": {"temperature": 1.2, "seed": 8, "top_k": 100, "top_p": 1.0, "min_p": 0.0},
    "mirostat": {"mirostat_mode": 1, "seed": 5},
    "mirostat 2": {"mirostat_mode": 2, "seed": 5},
    "penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.5},
    "stop": {"temperature": 0.0, "stop": ["e", "a"]},
    "logit bias": {"temperature": 0.0, "logit_bias": {270: 8.0, 265: -5.0}},
    "grammar": {"temperature": 0.0, "grammar": LlamaGrammar.from_string(GRAMMAR, verbose=False)},
    "logits processor": {
        "temperature": 0.0,
        "logits_processor": LogitsProcessorList([penalise_e]),
    },
    "echo": {"temperature": 0.0, "echo": True},
    "stopping criteria": {
        "temperature": 0.0,
        "stopping_criteria": llama_cpp.StoppingCriteriaList([lambda ids, _: len(ids) > 40]),
    },
}


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, store: str) -> Iterator[tuple[EntropyLlama, Llama]]:
    """Ours with all it can keep, and the stock one."""
    ours = EntropyLlama(str(tiny_llama), n_ctx=256, kv_type="f16", store=store, **QUIET)
    stock = Llama(str(tiny_llama), n_ctx=256, **QUIET)
    yield ours, stock
    ours.close()
    stock.close()


# --- the same answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_completions_are_those_of_stock(pair: tuple[EntropyLlama, Llama], call: str) -> None:
    """Not only the text: usage and finish_reason, too. Few sampled tokens: rounding adds up."""
    ours, stock = pair
    options = {"max_tokens": 12 if "seed" in CALLS[call] else 24, **CALLS[call]}
    expected = content(stock.create_completion(PROMPT, **options))
    assert content(ours(PROMPT, **options)) == expected
    assert expected["choices"][0]["text"]


@pytest.mark.parametrize("call", ["greedy", "sampled", "stop", "grammar"])
def test_streams_are_those_of_stock(pair: tuple[EntropyLlama, Llama], call: str) -> None:
    ours, stock = pair
    options = {"max_tokens": 12 if "seed" in CALLS[call] else 24, "stream": True, **CALLS[call]}
    expected = [content(chunk) for chunk in stock.create_completion(PROMPT, **options)]
    assert [content(chunk) for chunk in ours.create_completion(PROMPT, **options)] == expected
    assert len(expected) > 2 or call == "stop"


def test_logprobs_are_those_of_stock(tiny_llama: Path, store: str) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logprobs": 3}
    rows = []
    for kind, more in ((Llama, {}), (EntropyLlama, {"kv_type": "f16", "store": store})):
        llm = kind(str(tiny_llama), n_ctx=128, n_batch=32, logits_all=True, **QUIET, **more)
        llm(PROMPT, **options)
        row = llm(PROMPT + "an", echo=True, **options)["choices"][0]["logprobs"]
        rows.append(row)
        streamed = [
            chunk["choices"][0]["logprobs"] for chunk in llm(PROMPT, stream=True, **options)
        ]
        rows.append([part["token_logprobs"][0] for part in streamed if part])
        assert len(llm.eval_logits) == llm.n_tokens
        llm.close()
    stock, stock_stream, ours, ours_stream = rows
    assert ours["tokens"] == stock["tokens"]
    assert ours["text_offset"] == stock["text_offset"]
    np.testing.assert_allclose(ours["token_logprobs"][1:], stock["token_logprobs"][1:], atol=2e-2)
    for mine, theirs in zip(ours["top_logprobs"][1:], stock["top_logprobs"][1:], strict=True):
        assert mine.keys() == theirs.keys()
    np.testing.assert_allclose(ours_stream, stock_stream, atol=2e-2)


def test_logprobs_need_logits_all(pair: tuple[EntropyLlama, Llama]) -> None:
    with pytest.raises(ValueError, match="logits_all"):
        pair[0](PROMPT, logprobs=1)


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "seed": 11},
    "json": {"temperature": 0.0, "response_format": {"type": "json_object"}},
    "schema": {
        "temperature": 0.0,
        "response_format": {
            "type": "json_object",
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
            },
        },
    },
    "tool": {
        "temperature": 0.0,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look_up",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "maxLength": 8}},
                        "required": ["city"],
                    },
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    },
}


@pytest.fixture(scope="module")
def smol_pair(smollm2: Path) -> Iterator[tuple[EntropyLlama, Llama]]:
    """The flat store with llama.cpp's products: the same graph as stock's, so the same rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entropykv.store.flat.serves_products", lambda: False)
        patch.setattr("entropykv.llamacpp.model.reads_blocks", lambda: False)
        ours = EntropyLlama(str(smollm2), n_ctx=256, kv_type="f16", store="flat", **QUIET)
    stock = Llama(str(smollm2), n_ctx=256, **QUIET)
    yield ours, stock
    ours.close()
    stock.close()


@pytest.mark.parametrize("call", CHATS)
def test_chats_are_those_of_stock(smol_pair: tuple[EntropyLlama, Llama], call: str) -> None:
    ours, stock = smol_pair
    messages = [{"role": "user", "content": "Name a city in France."}]
    replies = []
    for llm in (stock, ours):
        options = {"max_tokens": 32, **CHATS[call]}
        reply = llm.create_chat_completion(messages, **options)["choices"]
        for choice in reply:
            for tool in choice["message"].get("tool_calls", ()):
                tool.pop("id")  # has that of the completion in it
        chunks = list(llm.create_chat_completion(messages, stream=True, **options))
        deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        replies.append((reply, deltas))
    assert replies[0] == replies[1]
    if call == "schema":
        assert "city" in json.loads(replies[1][0][0]["message"]["content"])


def test_a_chat_of_the_headwise_store_is_stocks_up_to_rounding(smollm2: Path) -> None:
    """Every token greedily chosen is one that stock ranks equal up to rounding."""
    rounding = 0.5
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ours = EntropyLlama(str(smollm2), n_ctx=256, kv_type="f16", **QUIET)
    reply = ours.create_chat_completion(messages, max_tokens=40, temperature=0.0)
    read = ours.input_ids[: ours.n_tokens].tolist()
    n_prompt = reply["usage"]["prompt_tokens"]
    stock = Llama(str(smollm2), n_ctx=256, logits_all=True, **QUIET)
    stock.eval(read)
    for number in range(n_prompt, len(read)):
        logits = stock.scores[number - 1]
        assert logits.max() - logits[read[number]] < rounding
    assert answer(reply).strip()
    ours.close()
    stock.close()


def test_the_bitnet_with_squared_relu(store: str) -> None:
    """Stock llama.cpp would compute SiLU; a Session's greedy text is the yardstick."""
    demo = shipped.DEMOS["bitnet"]
    document = demo.document.read_text(encoding="utf-8")
    with Session(demo.path, n_ctx=512, kv_type="f16", store=store, n_threads=1) as session:
        prompt = session.tokenize(document)[:200]
        expected = list(session.generate(prompt, max_tokens=20))
    llm = EntropyLlama(str(demo.path), n_ctx=512, kv_type="f16", store=store, **QUIET)
    reply = llm(prompt, max_tokens=20, temperature=0.0)
    read = llm.input_ids[len(prompt) : llm.n_tokens].tolist()
    assert read == expected[: len(read)]
    assert len(read) >= min(len(expected), 19)
    assert reply["usage"]["prompt_tokens"] == 200
    stock = Llama(str(demo.path), n_ctx=512, **QUIET)
    stock.eval(prompt)
    llm.reset()
    llm.eval(prompt)
    silu = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(stock.ctx, -1), (llm.n_vocab(),))
    assert np.abs(silu - llm.scores[0]).max() > 0.1
    stock.close()
    llm.close()


# --- arguments ------------------------------------------------------------------------------------


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
    """A LoRA adapter of the first layer's output projection."""
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
    """In the budget's context, and in the one that detach() makes."""
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
        ({"type_k": 1, "type_v": 8}, "type_k is 1 but kv_type is 'auto'"),
        ({"type_v": llama_cpp.GGML_TYPE_Q4_0, "kv_type": "f16"}, "type_v is 2 .* leave type_v out"),
        ({"kv_bugdet": 0.2}, "kv_bugdet is no argument"),
        ({"kv_type": "q4_0"}, "kv_type cannot be 'q4_0'"),
        ({"policy": "best"}, "policy cannot be 'best'"),
        ({"n_ctx": -1}, "n_ctx cannot be -1"),
        ({"n_batch": 0}, "n_batch cannot be 0"),
        ({"n_ubatch": 0}, "n_ubatch cannot be 0"),
        (
            {"draft_model": LlamaPromptLookupDecoding(), "kv_budget": 0.5},
            "draft_model .* kv_budget",
        ),
        ({"chat_handler": MTMDChatHandler.__new__(MTMDChatHandler)}, "images"),
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
    """Without a device nothing is, whatever n_gpu_layers says: as in stock."""
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
    for name, number in (("q8_0", llama_cpp.GGML_TYPE_Q8_0), ("f16", llama_cpp.GGML_TYPE_F16)):
        llm = EntropyLlama(str(tiny_llama), n_ctx=64, type_k=number, type_v=number, **QUIET)
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


def test_a_draft_model_works_where_nothing_is_evicted(tiny_llama: Path, store: str) -> None:
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


# --- attach and detach ----------------------------------------------------------------------------


def test_attach_in_place_and_back(tiny_llama: Path, store: str) -> None:
    stock = Llama(str(tiny_llama), n_ctx=200, **QUIET)
    handle = stock.model
    before = content(stock(PROMPT, max_tokens=20, temperature=0.0))
    old_context = stock._ctx
    llm = attach(stock, kv_budget=0.5, kv_type="f16", store=store, n_sinks=2, recent_window=20)
    assert llm is stock
    assert isinstance(stock, EntropyLlama)
    assert old_context.ctx is None  # freed
    assert stock.model == handle  # not loaded again
    assert stock.n_tokens == 0
    assert stock.n_ctx() == 200
    assert content(stock(PROMPT, max_tokens=20, temperature=0.0)) == before
    assert llm.kv_stats().kv_budget == "0.5"
    assert llm.kv_stats().store == store
    assert detach(llm) is stock
    assert type(stock) is Llama
    assert stock.n_tokens == 0
    assert content(stock(PROMPT, max_tokens=20, temperature=0.0)) == before
    again = attach(stock, kv_budget=64)
    assert again(PROMPT, max_tokens=5, temperature=0.0)["usage"]["completion_tokens"] > 0
    stock.close()


def test_an_entropy_llama_can_be_detached(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, n_batch=64, kv_type="f16", **QUIET)
    expected = content(llm(PROMPT * 4, max_tokens=20, temperature=0.0))
    stock = detach(llm)
    assert type(stock) is Llama
    assert stock.n_ctx() == 256
    assert content(stock(PROMPT * 4, max_tokens=20, temperature=0.0)) == expected
    stock.close()


def test_attach_and_detach_of_the_wrong_thing(tiny_llama: Path) -> None:
    class Mine(Llama):  # type: ignore[misc]
        pass

    stock = Llama(str(tiny_llama), n_ctx=64, **QUIET)
    with pytest.raises(SettingsError, match=r"not inside a KV budget; attach\(\)"):
        detach(stock)  # type: ignore[arg-type]
    attach(stock)
    with pytest.raises(SettingsError, match=r"inside a KV budget already; detach\(\)"):
        attach(stock)
    stock.close()
    with pytest.raises(EntropyKVError, match="closed"):
        detach(stock)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="not str"):
        attach("model.gguf")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="not Mine"):
        attach(Mine(str(tiny_llama), n_ctx=64, **QUIET))
    cached = Llama(str(tiny_llama), n_ctx=64, **QUIET)
    cached.set_cache(llama_cpp.LlamaRAMCache())
    with pytest.raises(SettingsError, match=r"set_cache\(None\)"):
        attach(cached)
    closed = Llama(str(tiny_llama), n_ctx=64, **QUIET)
    closed.close()
    with pytest.raises(EntropyKVError, match="closed"):
        attach(closed)
    embedder = Llama(str(tiny_llama), n_ctx=64, embedding=True, **QUIET)
    with pytest.raises(SettingsError, match="embedding"):
        attach(embedder)


def test_an_attach_that_fails_changes_nothing(tiny_llama: Path) -> None:
    stock = Llama(str(tiny_llama), n_ctx=200, **QUIET)
    expected = content(stock(PROMPT, max_tokens=10, temperature=0.0))
    for arguments, error in (({"kv_budget": 2}, BudgetError), ({"kv_type": "q2"}, SettingsError)):
        with pytest.raises(error):
            attach(stock, **arguments)  # type: ignore[arg-type]
    stock.draft_model = LlamaPromptLookupDecoding()
    with pytest.raises(SettingsError, match="draft_model"):
        attach(stock, 0.5)
    stock.draft_model = None
    assert type(stock) is Llama
    assert stock.n_tokens > 0
    assert content(stock(PROMPT, max_tokens=10, temperature=0.0)) == expected
    stock.close()


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_stock_cache_costs_no_memory(smollm2: Path) -> None:
    """8,192 cells of f16 are 180 MiB: attach() frees them, and EntropyLlama never has them."""
    n_ctx, cache_bytes = 8192, 8192 * 30 * 2 * 3 * 64 * 2
    sizes = [resident_bytes()]
    llms: list[Llama] = []
    for length in (512, 512, n_ctx):  # the first one also maps libraries
        llms.append(EntropyLlama(str(smollm2), n_ctx=length, kv_budget=256, **QUIET))
        sizes.append(resident_bytes())
    _, short, long = np.diff(sizes)
    assert long < short + cache_bytes / 5
    llms.append(Llama(str(smollm2), n_ctx=n_ctx, **QUIET))
    full = resident_bytes()
    attach(llms[-1], kv_budget=256)
    assert full - resident_bytes() > cache_bytes / 2
    for llm in llms:
        llm.close()


def test_the_stub_has_hardly_any_cells(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python makes a context before ours can take its place."""
    cells = []
    original = llama_cpp.llama_init_from_model

    def recorded(model: Any, parameters: Any) -> Any:
        context = original(model, parameters)
        cells.append(llama_cpp.llama_n_ctx(context))
        return context

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_init_from_model", recorded)
    EntropyLlama(str(tiny_llama), n_ctx=100_000, **QUIET).close()
    assert cells == [256]


def test_the_example(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    runpy.run_path(str(EXAMPLES / "embed_llama.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "entries evicted at" in printed
    assert re.search(r"\d+ tokens read, \d+ written", printed)


# --- life -----------------------------------------------------------------------------------------


def test_deleting_is_enough(tiny_llama: Path) -> None:
    """No cycle keeps the session (and its pool) alive; close() frees it while `llm` lives on."""
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, **QUIET)
    gone = weakref.ref(llm._session)
    llm(PROMPT, max_tokens=2)
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, **QUIET)
    gone = weakref.ref(llm._session)
    llm.close()
    llm.close()
    assert gone() is None
    for use in (llm.kv_stats, llm.reset, lambda: llm.eval([5]), lambda: llm(PROMPT)):
        with pytest.raises(EntropyKVError, match="closed"):
            use()


def test_pickling_makes_another_one(tiny_llama: Path) -> None:
    llm = EntropyLlama(
        str(tiny_llama), n_ctx=96, kv_budget=48, kv_type="q8_0", policy="streaming", **QUIET
    )
    expected = content(llm(PROMPT, max_tokens=20, temperature=0.0))
    other = pickle.loads(pickle.dumps(llm))  # noqa: S301
    assert type(other) is EntropyLlama
    assert content(other(PROMPT, max_tokens=20, temperature=0.0)) == expected
    mine, theirs = llm.kv_stats(), other.kv_stats()
    for name in ("kv_budget", "policy", "kv_type", "n_ctx", "kv_bytes_budget", "evictions"):
        assert getattr(mine, name) == getattr(theirs, name)
    llm.close()
    other.close()


def test_statistics_tell_prompt_from_generated(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    first = llm(PROMPT, max_tokens=9, temperature=0.0, logit_bias={2: -1e9})["usage"]
    stats = llm.kv_stats()
    assert stats.prompt_tokens == first["prompt_tokens"]
    assert stats.generated_tokens == first["completion_tokens"] >= 9
    assert min(stats.prompt_seconds, stats.decode_seconds) > 0
    other = llm("of another", max_tokens=3, temperature=0.0, logit_bias={2: -1e9})["usage"]
    stats = llm.kv_stats()
    both = first["prompt_tokens"] + other["prompt_tokens"]
    assert both - 1 <= stats.prompt_tokens <= both  # the two may share their BOS
    assert stats.generated_tokens == first["completion_tokens"] + other["completion_tokens"]
    llm.close()


def test_on_evict_tells_what_was_dropped(tiny_llama: Path, store: str) -> None:
    events: list[EvictionEvent] = []
    llm = EntropyLlama(
        str(tiny_llama),
        n_ctx=512,
        kv_budget=64,
        n_ubatch=32,
        store=store,
        on_evict=events.append,
        **QUIET,
    )
    llm.eval(tokens_for(60))
    assert events == []
    llm.eval(tokens_for(200))
    assert len(events) == 1  # one for the decode call, not one for each micro-batch
    assert events[0].position == 260
    assert events[0].kept == llm.kv_stats().entries_kept
    assert events[0].evicted + events[0].kept == 260 * 6
    llm("and so on", max_tokens=120, temperature=0.0, logit_bias={2: -1e9})
    assert sum(event.evicted for event in events) == llm.kv_stats().evictions
    with pytest.raises(AttributeError):
        events[0].kept = 0  # type: ignore[misc]
    llm.close()


# --- what goes wrong half-way ---------------------------------------------------------------------


def test_a_stream_closed_half_way(pair: tuple[EntropyLlama, Llama]) -> None:
    ours, _ = pair
    expected = content(ours(PROMPT, max_tokens=24, temperature=0.0))
    ours.reset()
    stream = ours(PROMPT, max_tokens=24, temperature=0.0, stream=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert ours.n_tokens == ours._session.position
    assert content(ours(PROMPT, max_tokens=24, temperature=0.0)) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_in_a_logits_processor(pair: tuple[EntropyLlama, Llama]) -> None:
    """llama-cpp-python reports it, and goes on without the processor: so does ours."""
    ours, _ = pair

    def fails(_: Any, __: Any) -> Any:
        raise ZeroDivisionError

    expected = content(ours(PROMPT, max_tokens=6, temperature=0.0))
    processors = LogitsProcessorList([fails])
    ours(PROMPT, max_tokens=6, temperature=0.0, logits_processor=processors)
    assert content(ours(PROMPT, max_tokens=6, temperature=0.0)) == expected


def test_an_exception_in_stopping_criteria(pair: tuple[EntropyLlama, Llama]) -> None:
    ours, _ = pair

    def fails(ids: Any, logits: Any) -> bool:
        assert logits.shape == (ours.n_vocab(),)
        if len(ids) > 30:
            raise ZeroDivisionError
        return False

    expected = content(ours(PROMPT, max_tokens=20, temperature=0.0))
    criteria = llama_cpp.StoppingCriteriaList([fails])
    with pytest.raises(ZeroDivisionError):
        ours(PROMPT, max_tokens=20, temperature=0.0, stopping_criteria=criteria)
    assert content(ours(PROMPT, max_tokens=20, temperature=0.0)) == expected


def test_an_exception_of_on_evict_leaves_the_model_where_it_is(tiny_llama: Path) -> None:
    angry = [True]

    def on_evict(_: EvictionEvent) -> None:
        if angry[0]:
            raise ZeroDivisionError

    def make(callback: Any) -> EntropyLlama:
        return EntropyLlama(
            str(tiny_llama), n_ctx=512, kv_budget=64, n_ubatch=32, on_evict=callback, **QUIET
        )

    llm, calm = make(on_evict), make(None)
    tokens = tokens_for(150)
    with pytest.raises(ZeroDivisionError):
        llm.eval(tokens)
    angry[0] = False
    calm.eval(tokens)
    assert llm.n_tokens == calm.n_tokens == 150
    more = tokens_for(20, seed=9)
    for each in (llm, calm):
        each.eval(more)
    np.testing.assert_array_equal(llm.scores, calm.scores)
    llm.close()
    calm.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_reading(
    tiny_llama: Path, store: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second micro-batch: what was read before counts, and the rest is read afresh."""
    llm = EntropyLlama(str(tiny_llama), n_ctx=512, n_ubatch=32, kv_budget=96, store=store, **QUIET)
    tokens = tokens_for(120)
    expected = content(llm(tokens, max_tokens=8, temperature=0.0))
    llm.reset()
    inner = llm._session._store
    original = getattr(inner, moment)
    calls = []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(inner, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm(tokens, max_tokens=8, temperature=0.0)
        assert llm.n_tokens == 32
    with pytest.raises(EntropyKVError, match="half-way"):
        llm._session.decode([5])
    assert content(llm(tokens, max_tokens=8, temperature=0.0)) == expected
    llm.close()


# --- state ----------------------------------------------------------------------------------------


def decoded_by(llm: EntropyLlama) -> list[int]:
    """A list that gets every token that is decoded from now on."""
    tokens: list[int] = []
    session = llm._session
    decode = session.decode_micro_batches

    def spy(ids: Any, all_logits: bool) -> Iterator[Any]:
        tokens.extend(ids)
        return decode(ids, all_logits)

    session.decode_micro_batches = spy  # type: ignore[method-assign]
    return tokens


def test_state_is_saved_and_loaded(tiny_llama: Path, store: str) -> None:
    def make() -> EntropyLlama:
        return EntropyLlama(
            str(tiny_llama), n_ctx=512, kv_budget=64, n_ubatch=32, store=store, **QUIET
        )

    llm, other = make(), make()
    llm(tokens_for(150), max_tokens=10, temperature=0.0)
    state = llm.save_state()
    assert state.llama_state_size == len(state.llama_state)
    prompt = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens_for(12, seed=5)]
    expected = content(llm(prompt, max_tokens=10, temperature=0.0))
    for each in (llm, other):
        each.load_state(state)
        assert each.n_tokens == len(prompt) - 12
        decoded = decoded_by(each)
        assert content(each(prompt, max_tokens=10, temperature=0.0)) == expected
        assert decoded[:12] == prompt[-12:]
    foreign = llama_cpp.Llama(str(tiny_llama), n_ctx=64, **QUIET)
    foreign.eval([5])
    with pytest.raises(EntropyKVError):
        llm.load_state(foreign.save_state())
    assert llm([5, 6], max_tokens=2, temperature=0.0)["usage"]["prompt_tokens"] == 2
    foreign.close()
    llm.close()
    other.close()


def test_a_cache_of_prompts(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=512, kv_budget=96, n_ubatch=32, **QUIET)
    llm.set_cache(llama_cpp.LlamaRAMCache())
    first, second = tokens_for(140), tokens_for(140, seed=8)
    llm(first, max_tokens=5, temperature=0.0)
    longer = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens_for(7, seed=5)]
    llm(second, max_tokens=5, temperature=0.0)
    decoded = decoded_by(llm)
    llm(longer, max_tokens=5, temperature=0.0)
    assert decoded[:7] == longer[-7:]
    llm.close()


def test_seeds(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, seed=3, kv_type="f16", **QUIET)
    stock = Llama(str(tiny_llama), n_ctx=64, seed=3, **QUIET)
    for each in (llm, stock):
        each.set_seed(12)
    assert content(llm(PROMPT, max_tokens=8)) == content(stock(PROMPT, max_tokens=8))
    assert llm.tokenize(b"the land", special=True) == stock.tokenize(b"the land", special=True)
    assert llm.detokenize([270, 271]) == stock.detokenize([270, 271])
    llm.close()
    stock.close()


def test_squared_relu_needs_no_other_file(tmp_path: Path) -> None:
    """The activation that the file names is computed, whichever way the model was loaded."""
    path = tmp_path / "relu2.gguf"
    write_llama(path, weight_type="F32", activation="relu2")
    tokens = tokens_for(20)
    with Session(path, n_ctx=64, kv_type="f16", n_threads=1) as session:
        expected = session.decode(tokens, all_logits=True)
    llm = attach(Llama(str(path), n_ctx=64, logits_all=True, **QUIET), kv_type="f16")
    llm.eval(tokens)
    np.testing.assert_array_equal(llm.scores[:20], expected)
    llm.close()
