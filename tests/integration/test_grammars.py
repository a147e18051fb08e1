"""Grammars allow the same tokens as llama.cpp with real vocabularies, and requests end early."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_grammar

from entropykv import EntropyLlama
from entropykv.errors import SettingsError
from entropykv.llamacpp.grammar_sampler import GrammarSampler
from entropykv.llamacpp.model import Model
from entropykv.server.loading import ServedLlama
from tests.support.grammars import KIND, bomb
from tests.support.running_server import MODEL, Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "größe"]}, "maxItems": 3},
        "n": {"type": "number"},
    },
    "required": ["name"],
}
GRAMMARS = {
    "json": llama_grammar.JSON_GBNF,
    "arithmetic": llama_grammar.ARITHMETIC_GBNF,
    "c": llama_grammar.C_GBNF,
    "chess": llama_grammar.CHESS_GBNF,
    "array": llama_grammar.JSON_ARR_GBNF,
    "schema": llama_grammar.json_schema_to_gbnf(json.dumps(SCHEMA)),
    "ambiguous": 'root ::= [a-z ]+ "ing" | ([a-m]* [n-z ]*)+ "."',
    "repeated": 'root ::= ("ab"{2,3} | [c-e]+?){1,4} "x"',
    "any": "root ::= .*",
    "escapes": r'root ::= "\x41\u00e9\U0001F600"* ("b"|) [^\x00-\x40]+',
}
SLOW = "root ::= x{0,4000}\nx ::= " + " | ".join(
    f"[{chr(ord('A') + i % 26)}-z .,{chr(0x4E00 + i)}]" for i in range(12_000)
)
"""Each of its thousands of alternatives is tried with every token."""


@pytest.fixture(scope="module", params=["demo", "smollm2"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    path = MODEL if request.param == "demo" else request.getfixturevalue("smollm2")
    made = Model(path, n_gpu_layers=0, verbose=False)
    yield made
    made.close()


def masked(sampler: Any, n_vocab: int) -> set[int]:
    data = np.zeros(n_vocab, KIND)
    data["id"] = np.arange(n_vocab)
    pointer = data.ctypes.data_as(llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(pointer, n_vocab, -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    return set(np.flatnonzero(data["logit"] == 0.0).tolist())


def whole_texts(model: Model) -> set[int]:
    """Return the tokens that consist of whole characters.

    Of other tokens, llama.cpp refuses some that are valid, and allows bytes that belong to no
    character.
    """
    whole = set()
    for token in range(model.n_vocab):
        with contextlib.suppress(UnicodeDecodeError):
            model.token_bytes(token, special=True).decode("utf-8")
            whole.add(token)
    return whole


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_tokens_are_those_that_llama_cpp_allows(model: Model, name: str) -> None:
    whole = whole_texts(model)
    choose = random.Random(name)
    for _ in range(3):
        ours = GrammarSampler(GRAMMARS[name], model.vocabulary, model.token_trie)
        both = [
            ours.handle(),
            llama_cpp.llama_sampler_init_grammar(
                model.vocabulary, GRAMMARS[name].encode(), b"root"
            ),
        ]
        for _ in range(15):
            allowed, expected = (masked(each, model.n_vocab) & whole for each in both)
            ours.check()
            assert allowed == expected
            choices = [token for token in allowed if not model.is_end(token)]
            if not choices:
                break
            token = choose.choice(sorted(choices))
            for each in both:
                llama_cpp.llama_sampler_accept(each, token)
            ours.check()
        for each in both:
            llama_cpp.llama_sampler_free(each)


def test_a_token_by_its_name(model: Model) -> None:
    end = llama_cpp.llama_vocab_eos(model.vocabulary)
    other = next(token for token in range(model.n_vocab) if model.token_bytes(token) == b"e")
    text = f"root ::= <[{other}]> !<[{other}]>"
    sampler = GrammarSampler(text, model.vocabulary, model.token_trie)
    handle = sampler.handle()
    assert masked(handle, model.n_vocab) == {other}
    llama_cpp.llama_sampler_accept(handle, other)
    after = masked(handle, model.n_vocab)
    assert {other, end}.isdisjoint(after)
    assert len(after) > model.n_vocab // 2
    llama_cpp.llama_sampler_free(handle)
    with pytest.raises(SettingsError, match="not one token"):
        GrammarSampler("root ::= <of several tokens>", model.vocabulary, model.token_trie)


# --- EntropyLlama ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Iterator[ServedLlama]:
    made = ServedLlama(MODEL, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    yield made
    made.close()


def grammar_of(text: str) -> llama_grammar.LlamaGrammar:
    return llama_grammar.LlamaGrammar.from_string(text, verbose=False)


def test_a_search_asks_whether_to_go_on(llama: ServedLlama) -> None:
    calls = 0

    class LeftError(Exception):
        pass

    def ask() -> None:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise LeftError

    llama.checkpoint = ask
    limit = -1
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    llama("a", **options)
    usual, calls, limit = calls, 0, 20
    with pytest.raises(LeftError):
        llama("a", **options, grammar=grammar_of(SLOW))
    assert usual < 20
    llama.checkpoint = None
    text = llama("b", **options, grammar=grammar_of('root ::= "on"'))["choices"][0]["text"]
    assert "on".startswith(text)


def test_an_answer_ends_where_a_grammar_allows_no_token(llama: ServedLlama) -> None:
    """It asks for the token that ends a text; llama.cpp's own sampler would end the process."""
    grammar = grammar_of(f'root ::= "on" <[{llama.token_eos()}]>')
    for temperature in (0.0, 1.0):
        answer = llama("a", grammar=grammar, temperature=temperature)
        assert answer["choices"][0]["text"] == "on"
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_model_is_freed_with_its_last_grammar() -> None:
    """The garbage collector, which may run late, must not be needed, because the sampler holds the
    weights.
    """
    gc.collect()
    gc.disable()
    made = ServedLlama(MODEL, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    made("a", max_tokens=1, grammar=grammar_of(SLOW))
    matcher = weakref.ref(made._sampler._grammar)
    made("a", max_tokens=1, grammar=grammar_of('root ::= "on"'))
    assert matcher() is None
    made.close()
    gc.enable()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_a_chat_refuses_schemas_that_are_too_much() -> None:
    llama = EntropyLlama(MODEL, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    huge = {"type": "array", "items": {"type": "null"}, "minItems": 20_000_000}
    format_of = {"type": "json_object", "schema": huge}
    with pytest.raises(SettingsError, match="minItems"):
        llama.create_chat_completion(**chat, response_format=format_of)
    refs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    laughs = {"$ref": "#/$defs/d0", "$defs": {**refs, "d40": {"type": "null"}}}
    choice = {"type": "function", "function": {"name": "a"}}
    for parameters, reason in ((huge, "minItems"), (laughs, "references")):
        tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
        with pytest.raises(SettingsError, match=reason):
            llama.create_chat_completion(**chat, tools=[tool], tool_choice=choice)
    answer = llama.create_chat_completion(
        **chat, response_format={"type": "json_object", "schema": {"type": "boolean"}}
    )
    assert answer["choices"][0]["message"]["content"].strip() in ("true", "false")
    llama.close()


# --- the server -----------------------------------------------------------------------------------


def ask(server: Server, seconds: float = 60, **options: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 4000, "grammar": SLOW, "logit_bias": {}, **options}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=seconds)


@pytest.mark.parametrize("options", [(), ("--parallel", 2)], ids=["alone", "parallel"])
def test_requests_end_while_a_grammar_is_searched(options: tuple[object, ...]) -> None:
    """They end by --request-seconds, by a client that disconnects, and by SIGTERM."""
    server = Server("--request-seconds", 1, *options)
    start = time.monotonic()
    assert ask(server).status_code == 504
    assert time.monotonic() - start < 3
    with pytest.raises(httpx.ReadTimeout):
        ask(server, seconds=0.3)
    server.idle_figures(seconds=0.5)
    assert ask(server, grammar='root ::= "on"').json()["choices"][0]["text"] == "on"
    waiting = threading.Thread(target=ask, args=(server,))
    waiting.start()
    time.sleep(0.2)
    start = time.monotonic()
    code, errors = server.end()
    waiting.join()
    assert code == 0
    assert time.monotonic() - start < 5
    assert "Traceback" not in errors, errors


@pytest.mark.parametrize("parallel", [1, 2])
def test_an_ambiguous_grammar_is_refused_and_nobody_waits(parallel: int) -> None:
    server = Server("--parallel", parallel)
    start = time.monotonic()
    answer = ask(server, grammar=bomb(24))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "grammar"
    assert "ambiguous" in answer.json()["error"]["message"]
    grows = 'root ::= "a" root root "b" | "a" root "b" | "a" root root "c" | "a"'
    answer = ask(server, grammar=grows, prompt="aaaa")
    assert answer.status_code == 400
    assert "ambiguous" in answer.json()["error"]["message"]
    streamed = ask(server, grammar=grows, prompt="aaaa", stream=True)
    assert "ambiguous" in streamed.text
    assert ask(server, grammar='root ::= "on"').status_code == 200
    assert time.monotonic() - start < 10
    assert server.end()[0] == 0
