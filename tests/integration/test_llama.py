"""EntropyLlama replaces llama_cpp.Llama: the same calls give the same answers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList

from entropykv import EntropyLlama, Session, SettingsError
from entropykv.model import shipped
from tests.support.constraints import schema_takes
from tests.support.llamas import GRAMMAR, PROMPT, QUIET, answer, as_long, content


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
    "logits processor": {"temperature": 0.0, "logits_processor": LogitsProcessorList([penalise_e])},
    "echo": {"temperature": 0.0, "echo": True},
    "stopping criteria": {
        "temperature": 0.0,
        "stopping_criteria": llama_cpp.StoppingCriteriaList([lambda ids, _: len(ids) > 40]),
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_completions_are_those_of_stock(pair: tuple[EntropyLlama, Llama], call: str) -> None:
    """Answers equal stock's in text, usage and finish_reason.

    Only few tokens are sampled, because rounding errors add up.
    """
    ours, stock = pair
    options = {"max_tokens": 12 if "seed" in CALLS[call] else 24, **CALLS[call]}
    expected = content(stock.create_completion(PROMPT, **options))
    assert content(ours(PROMPT, **as_long(options, expected))) == expected
    assert expected["choices"][0]["text"]


@pytest.mark.parametrize("call", ["greedy", "sampled", "stop", "grammar"])
def test_streams_are_those_of_stock(pair: tuple[EntropyLlama, Llama], call: str) -> None:
    ours, stock = pair
    options = {"max_tokens": 12 if "seed" in CALLS[call] else 24, **CALLS[call]}
    whole = stock.create_completion(PROMPT, **options)
    expected = [*stock.create_completion(PROMPT, stream=True, **options)]
    found = [*ours.create_completion(PROMPT, stream=True, **as_long(options, whole))]
    # A stream of stock's lacks characters that consist of several tokens.
    assert "".join(each["choices"][0]["text"] for each in found) == whole["choices"][0]["text"]
    assert [each["choices"][0]["finish_reason"] for each in found[:-1]] == [None] * (len(found) - 1)
    assert content(found[-1]) == content(expected[-1])
    assert {str(each.keys()) for each in found} == {str(each.keys()) for each in expected}
    assert len(found) > 2 or call == "stop"


CALLS_OF_LLAMA = ("create_completion", "__call__", "create_chat_completion", "generate", "sample")


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 1}], ids=str)
def test_scores_have_the_logits_of_all_tokens(tiny_llama: Path, options: dict[str, Any]) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=128, logits_all=True, kv_type="f16", **QUIET)
    for text in (PROMPT, PROMPT[:30], PROMPT[:20] + "and"):
        llm(text, max_tokens=5, temperature=0.0, **options)
        ids, rows = llm.input_ids[: llm.n_tokens].tolist(), llm.scores[: llm.n_tokens].copy()
        llm.reset()
        llm.scores[:] = 0.0
        llm.eval(ids)
        np.testing.assert_allclose(rows, llm.scores[: llm.n_tokens], atol=0.05 * rows.std())
    llm.close()


@pytest.mark.parametrize("name", CALLS_OF_LLAMA)
def test_signatures_are_those_of_stock(name: str) -> None:
    ours, stock = (inspect.signature(getattr(kind, name)) for kind in (EntropyLlama, Llama))
    assert ours == stock


def test_tokens_behind_the_end_of_a_text_are_those_of_stock(
    pair: tuple[EntropyLlama, Llama],
) -> None:
    found = []
    for llm in pair:
        prompt, n_before = llm.tokenize(PROMPT.encode()), len(llm.tokenize(PROMPT.encode())) + 2

        def ends(ids: Any, scores: Any, at: int = n_before) -> Any:
            if len(ids) == at:
                scores[:] = -1e9
                scores[2] = 0.0
            return scores

        stream = llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([ends]))
        found.append([next(stream) for _ in range(6)])
        stream.close()
    assert found[0] == found[1]
    assert found[0][2] == pair[0].token_eos()


def test_tokens_that_are_sent_are_read_next(pair: tuple[EntropyLlama, Llama]) -> None:
    ours, _ = pair
    prompt = ours.tokenize(PROMPT.encode())
    stream = ours.generate(prompt, temp=0.0)
    first, second = next(stream), stream.send([70, 71])
    assert ours.input_ids[: ours.n_tokens].tolist() == [*prompt, first, 70, 71]
    stream.close()
    ours.reset()
    ours.eval([*prompt, first, 70, 71])
    assert ours.sample(temp=0.0) == second


def test_a_text_between_two_others_is_refused_by_name(pair: tuple[EntropyLlama, Llama]) -> None:
    """A suffix is refused for a model without tokens for it; stock would use token 0 instead."""
    with pytest.raises(SettingsError, match="suffix: the model was not trained"):
        pair[0]("def add(", suffix="return a", max_tokens=2)


def test_logprobs_are_those_of_stock(tiny_llama: Path, store: str) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logprobs": 3}
    rows: list[Any] = []
    for kind, more in ((Llama, {}), (EntropyLlama, {"kv_type": "f16", "store": store})):
        llm = kind(str(tiny_llama), n_ctx=128, n_batch=32, logits_all=True, **QUIET, **more)
        llm(PROMPT, **options)
        whole = llm(PROMPT + "an", echo=True, **options)
        options = as_long(options, whole)
        rows.append(whole["choices"][0]["logprobs"])
        streamed = [
            chunk["choices"][0]["logprobs"] for chunk in llm(PROMPT, stream=True, **options)
        ]
        rows.append([value for part in streamed if part for value in part["token_logprobs"]])
        assert len(llm.eval_logits) == llm.n_tokens
        llm.close()
    stock, stock_stream, ours, ours_stream = rows
    assert ours["tokens"] == stock["tokens"]
    assert ours["text_offset"] == stock["text_offset"]
    np.testing.assert_allclose(ours["token_logprobs"][1:], stock["token_logprobs"][1:], atol=2e-2)
    for mine, theirs in zip(ours["top_logprobs"][1:], stock["top_logprobs"][1:], strict=True):
        assert mine.keys() == theirs.keys()
    n_streamed = min(len(ours_stream), len(stock_stream))
    assert n_streamed >= 12
    np.testing.assert_allclose(ours_stream[:n_streamed], stock_stream[:n_streamed], atol=2e-2)


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "seed": 11},
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
CHATS_OF_JSON: dict[str, dict[str, Any]] = {
    "json": {"response_format": {"type": "json_object"}},
    "schema": {"response_format": {"type": "json_object", "schema": CITY}},
    "tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
}


@pytest.fixture(scope="module")
def smol_pair(smollm2: Path) -> Iterator[tuple[EntropyLlama, Llama]]:
    """Open the flat store with llama.cpp's products, so that the graph and its rounding are those
    of stock.
    """
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
                tool.pop("id")  # The id contains that of the completion, which differs.
        chunks = list(llm.create_chat_completion(messages, stream=True, **options))
        deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        replies.append((reply, deltas))
    assert replies[0] == replies[1]


@pytest.mark.parametrize("call", CHATS_OF_JSON)
def test_chats_in_json_are_complete(smol_pair: tuple[EntropyLlama, Llama], call: str) -> None:
    """Chats in JSON are complete, unless max_tokens ends one that has no schema; stock
    llama_cpp.Llama cuts them off, because its grammars know fewer keywords.
    """
    ours, _ = smol_pair
    chat: Any = {"messages": [{"role": "user", "content": "Name a city in France, as JSON."}]}
    chat |= {"temperature": 0.0, "max_tokens": 100, **CHATS_OF_JSON[call]}
    choice = ours.create_chat_completion(**chat)["choices"][0]
    calls = choice["message"].get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
    assert (calls is not None) == (call == "tool")
    schema = {"type": "object"} if call == "json" else CITY
    is_whole = choice["finish_reason"] != "length"
    assert schema_takes(schema, text) == [is_whole], text
    assert is_whole or call == "json"
    streamed = ours.create_chat_completion(**chat, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    if calls is None:
        assert "".join(each.get("content") or "" for each in deltas) == text
    else:
        parts = [each["tool_calls"][0]["function"] for each in deltas if each.get("tool_calls")]
        assert "".join(each["arguments"] for each in parts) == text


def test_a_chat_of_the_headwise_store_is_stocks_up_to_rounding(smollm2: Path) -> None:
    """Every token that is chosen greedily is stock's choice, or equal to it up to rounding."""
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
    """The BitNet's greedy text is that of a Session; stock llama.cpp would compute SiLU instead."""
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
