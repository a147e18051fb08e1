"""With real vocabularies, grammars allow what llama.cpp allows, and answers follow schemas."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_grammar

from entropykv import EntropyLlama, Session
from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import CANDIDATE, ConstraintSampler
from entropykv.constraint.trial import Trials
from entropykv.errors import SettingsError
from entropykv.llamacpp.model import Model
from tests.support.constraints import schema_takes
from tests.support.grammars import AMBIGUOUS
from tests.support.running_server import MODEL, Server
from tests.support.waiting import wait_for

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
    "array": llama_grammar.JSON_ARR_GBNF,
    "schema": llama_grammar.json_schema_to_gbnf(json.dumps(SCHEMA)),
    "ambiguous": 'root ::= [a-z ]+ "ing" | ([a-m]* [n-z ]*)+ "."',
    "repeated": 'root ::= ("ab"{2,3} | [c-e]+?){1,4} "x"',
    "any": "root ::= .*",
    "escapes": r'root ::= "\x41\u00e9\U0001F600"* ("b"|) [^\x00-\x40]+',
}
SLOW = {"anyOf": [{"type": "integer", "multipleOf": 1009 + 2 * i} for i in range(50)]}
"""A schema whose compilation would take minutes."""


@pytest.fixture(scope="module", params=["demo", "smollm2"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    path = MODEL if request.param == "demo" else request.getfixturevalue("smollm2")
    made = Model(path, n_gpu_layers=0, verbose=False)
    yield made
    made.close()


def masked(sampler: Any, n_vocab: int) -> set[int]:
    data = np.zeros(n_vocab, CANDIDATE)
    data["id"] = np.arange(n_vocab)
    pointer = data.ctypes.data_as(llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(pointer, n_vocab, -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    return set(np.flatnonzero(data["logit"] == 0.0).tolist())


def whole_texts(model: Model) -> set[int]:
    """Return the tokens that consist of whole characters, and are no control tokens.

    These are the tokens about which llama.cpp and we must agree. For us a control token is no text,
    while llama.cpp takes its name as text; llama.cpp never allows a null character; and it treats
    tokens with parts of characters differently.
    """
    whole = set()
    for token in range(model.n_vocab):
        if llama_cpp.llama_vocab_is_control(model.vocabulary, token):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            text = model.token_bytes(token, special=True).decode("utf-8")
            if "\0" not in text:
                whole.add(token)
    return whole


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_tokens_are_those_that_llama_cpp_allows(model: Model, name: str) -> None:
    whole = whole_texts(model)
    choose = random.Random(name)
    for _ in range(2):
        ours = ConstraintSampler(Constraint.gbnf(GRAMMARS[name]), model.token_texts())
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
    sampler = ConstraintSampler(Constraint.gbnf(text), model.token_texts())
    handle = sampler.handle()
    assert masked(handle, model.n_vocab) == {other}
    llama_cpp.llama_sampler_accept(handle, other)
    after = masked(handle, model.n_vocab)
    assert {other, end}.isdisjoint(after)
    assert len(after) > model.n_vocab // 2
    llama_cpp.llama_sampler_free(handle)
    with pytest.raises(SettingsError, match="not one token"):
        ConstraintSampler(Constraint.gbnf("root ::= <of several tokens>"), model.token_texts())


@pytest.fixture(scope="module")
def llama() -> Iterator[EntropyLlama]:
    made = EntropyLlama(MODEL, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    yield made
    made.close()


def grammar_of(text: str) -> llama_grammar.LlamaGrammar:
    return llama_grammar.LlamaGrammar.from_string(text, verbose=False)


def test_a_trial_asks_whether_to_go_on() -> None:
    class LeftError(Exception):
        pass

    calls = 0

    def ask() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise LeftError

    with pytest.raises(LeftError):
        Trials().check(Constraint.json_schema(SLOW), ask)


def test_an_answer_ends_where_a_grammar_allows_no_token(llama: EntropyLlama) -> None:
    """An answer ends where a grammar asks for the token that ends a text; llama.cpp's own sampler
    would end the process.
    """
    grammar = grammar_of(f'root ::= "on" <[{llama.token_eos()}]>')
    for temperature in (0.0, 1.0):
        answer = llama("a", grammar=grammar, temperature=temperature)
        assert answer["choices"][0]["text"] == "on"
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_model_is_freed_with_its_last_grammar() -> None:
    """A model is freed with the last reference to it, without the garbage collector, which may run
    late: samplers hold the weights, but not the model.
    """
    made = EntropyLlama(MODEL, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    gc.collect()
    gc.disable()
    try:
        made("a", max_tokens=1, grammar=Constraint.json_object(), logits_processor=[_same])
        left = made("a", max_tokens=9, grammar=grammar_of('root ::= "on"+'), stream=True)
        next(left)
        gone = weakref.ref(made)
        del made, left
        assert gone() is None
    finally:
        gc.enable()


def _same(_: object, logits: object) -> object:
    return logits


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "temperature": 1.0}
FORMATS = [
    {"type": "json_object", "schema": {"enum": [12, "ja"]}},
    {"type": "json_schema", "json_schema": {"schema": {"enum": [12, "ja"]}}},
]


@pytest.mark.parametrize("asked", FORMATS, ids=["json_object", "json_schema"])
def test_a_chat_follows_its_schema(llama: EntropyLlama, asked: dict[str, Any]) -> None:
    for seed in range(4):
        answer = llama.create_chat_completion(
            **CHAT, response_format=asked, seed=seed, max_tokens=16
        )
        assert answer["choices"][0]["message"]["content"] in ("12", '"ja"')
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_chosen_tool_is_called_with_arguments_of_its_schema(llama: EntropyLlama) -> None:
    """Arguments obey the limits of a schema; llama-cpp-python's own converter ignores these."""
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 41, "maximum": 43}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "a"}}
    for stream in (False, True):
        answer = llama.create_chat_completion(
            **CHAT, tools=[tool], tool_choice=choice, max_tokens=220, stream=stream
        )
        parts = list(answer) if stream else [answer]
        found = [part["choices"][0].get("message") or part["choices"][0]["delta"] for part in parts]
        calls = [each["tool_calls"][0]["function"] for each in found if each.get("tool_calls")]
        text = "".join(call["arguments"] for call in calls)
        assert schema_takes(parameters, text) == [True], text


def test_a_chat_refuses_schemas_that_cannot_be_enforced(llama: EntropyLlama) -> None:
    chat = {**CHAT, "max_tokens": 8}
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}
    choice = {"type": "function", "function": {"name": "a"}}
    with pytest.raises(SettingsError, match="nothing"):
        llama.create_chat_completion(**chat, tools=[tool], tool_choice=choice)
    other = {"type": "function", "function": {"name": "b"}}
    with pytest.raises(SettingsError, match="no tool 'b'"):
        llama.create_chat_completion(**chat, tools=[tool], tool_choice=other)
    for asked in ({"type": "json_schema"}, {"type": "xml"}):
        with pytest.raises(SettingsError, match="response_format"):
            llama.create_chat_completion(**chat, response_format=asked)


def test_drafts_are_right_only_within_a_constraint() -> None:
    """An answer that repeats itself and follows a constraint is the same with drafts."""
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
    constraint = Constraint.regex("(ab ){3}(ab ac ){4}.{4}")
    texts = []
    for drafts in ({}, {"spec_type": "ngram"}):
        with Session(MODEL, **options, **drafts) as session:
            prompt = session.tokenize("ab ab ab ab ac ab ac ab ac ab ab ab ")
            tokens = [*session.generate(prompt, max_tokens=80, grammar=constraint)]
            texts.append(session.detokenize(tokens))
            if drafts:
                assert session.stats().drafted_tokens > 0
    assert texts[0] == texts[1]
    assert texts[0].startswith("ab ab ab ab ac ab ac ab ac ab ac ")


def ask(server: Server, seconds: float = 60, **options: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 400, "logit_bias": {}, **options}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=seconds)


@pytest.mark.parametrize("options", [(), ("--parallel", 2)], ids=["alone", "parallel"])
def test_requests_end_while_a_constraint_is_tried(options: tuple[object, ...]) -> None:
    """While a constraint is compiled, a request ends by --request-seconds, by a client that
    disconnects, and by SIGTERM.
    """
    server = Server("--request-seconds", 3, *options)
    assert ask(server, json_schema=SLOW).status_code == 504
    with pytest.raises(httpx.ReadTimeout):
        ask(server, seconds=0.3, json_schema=SLOW)
    server.idle_figures(seconds=2)
    assert ask(server, grammar='root ::= "on"').json()["choices"][0]["text"] == "on"
    waiting = threading.Thread(target=ask, args=(server,), kwargs={"json_schema": SLOW})
    waiting.start()
    wait_for(lambda: server.kv()["requests"]["waiting"])
    code, errors = server.end()
    waiting.join()
    assert code == 0
    assert "Traceback" not in errors, errors


ONLY = 'root ::= "yes" | "no"'
FIELDS: list[dict[str, Any]] = [
    {"grammar": ONLY},
    {"grammar": '%llguidance {}\nstart: "yes" | "no"'},
    {"regex": "yes|no"},
    {"structured_outputs": {"regex": "yes|no"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
    {"guided_choice": ["yes", "no"]},
    {"guided_regex": "yes|no"},
    {"guided_grammar": ONLY},
]
NUMBER = {"type": "integer", "minimum": 10, "maximum": 12}
SCHEMAS: list[dict[str, Any]] = [
    {"json_schema": NUMBER},
    {"structured_outputs": {"json": NUMBER}},
    {"guided_json": NUMBER},
]


def test_the_fields_of_other_servers_say_what_an_answer_must_be() -> None:
    with Server("--parallel", 2) as server:
        for fields in FIELDS:
            answer = ask(server, **fields, seed=3)
            assert answer.status_code == 200, (fields, answer.text)
            assert answer.json()["choices"][0]["text"] in ("yes", "no"), fields
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, **fields}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60)
            assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no"), fields
        for fields in SCHEMAS:
            assert ask(server, **fields).json()["choices"][0]["text"] in ("10", "11", "12")
        anything = ask(server, structured_outputs={"json_object": True}, max_tokens=2)
        assert anything.json()["choices"][0]["text"].startswith("{")
        both = ask(server, regex="a", json_schema={})
        assert both.status_code == 400
        assert "regex" in both.json()["error"]["message"]
        assert ask(server, structured_outputs={"structural_tag": "x"}).status_code == 400
        where = ask(server, json_schema={"properties": {"a": {"not": {}}}})
        assert where.status_code == 400
        assert where.json()["error"]["param"] == "json_schema"
        assert "#/properties/a" in where.json()["error"]["message"]


@pytest.mark.parametrize("parallel", [1, 2])
def test_an_ambiguous_grammar_is_refused_and_nobody_waits(parallel: int) -> None:
    with Server("--parallel", parallel) as server:
        # Without the token that ends a text, the answer cannot end.
        endless = {"grammar": AMBIGUOUS, "logit_bias": {"1": -1000}}
        answer = ask(server, **endless)
        assert answer.status_code == 400
        assert "ambiguous" in answer.json()["error"]["message"]
        streamed = ask(server, **endless, stream=True)
        assert "ambiguous" in streamed.text
        assert ask(server, grammar='root ::= "on"').status_code == 200
