"""Fields of requests that the server does not read are refused by their names."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import BaseModel

from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.dialects.anthropic_requests import MessagesRequest
from entropykv.server.dialects.llama_server_requests import LlamaServerCompletion
from entropykv.server.dialects.ollama_requests import OllamaChat
from entropykv.server.dialects.requests import CompletionRequest
from entropykv.server.dialects.responses import ResponsesRequest
from entropykv.server.http.bodies import read_body
from entropykv.server.http.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": MESSAGES}),
    (CompletionRequest, {"prompt": "hi"}),
    (ResponsesRequest, {"input": "hi"}),
    (OllamaChat, {"model": "m", "messages": MESSAGES}),
    (MessagesRequest, {"messages": MESSAGES, "max_tokens": 3}),
    (LlamaServerCompletion, {"prompt": "hi"}),
]


def body(fields: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**fields, **more}).encode()


@pytest.mark.parametrize(("model", "fields"), BODIES)
def test_a_field_that_does_not_exist_is_refused_by_its_name(
    model: type[BaseModel], fields: dict[str, Any]
) -> None:
    read_body(model, body(fields))
    with pytest.raises(RequestError, match="beam_width: there is no such field; leave") as refused:
        read_body(model, body(fields, beam_width=4))
    assert refused.value.status_code == 400
    assert refused.value.body["error"]["param"] == "beam_width"
    read_body(model, body(fields, beam_width=4), ignores_unknown=True)


def test_a_field_that_is_misspelt_is_told_its_name() -> None:
    with pytest.raises(RequestError, match=r"temprature: .* \(did you mean temperature\?\)"):
        read_body(ChatRequest, body({"messages": MESSAGES}, temprature=0))


@pytest.mark.parametrize("nothing", [None, False, "", [], {}])
def test_a_field_that_asks_for_nothing_may_be_there(nothing: Any) -> None:
    asked = read_body(ChatRequest, body({"messages": MESSAGES}, audio=nothing, length_penalty=None))
    assert asked == read_body(ChatRequest, body({"messages": MESSAGES}))


@pytest.mark.parametrize(
    ("fields", "alike"),
    [
        (
            {
                "store": True,
                "metadata": {"a": "b"},
                "service_tier": "auto",
                "prompt_cache_key": "x",
            },
            {},
        ),
        ({"min_keep": 0, "n_indent": 0, "lora": [], "length_penalty": 1.0, "api_key": "k"}, {}),
        (
            {"repetition_penalty": 1.1, "max_completion_tokens": 4, "n_predict": 4},
            {"repeat_penalty": 1.1, "max_completion_tokens": 4},
        ),
    ],
)
def test_fields_that_change_no_answer_and_names_of_others_are_accepted(
    fields: dict[str, Any], alike: dict[str, Any]
) -> None:
    asked = read_body(ChatRequest, body({"messages": MESSAGES}, **fields))
    assert asked == read_body(ChatRequest, body({"messages": MESSAGES}, **alike))


@pytest.mark.parametrize(
    ("model", "name", "value", "instead"),
    [
        (ChatRequest, "lora", [{"id": 0}], "start the server with --lora"),
        (ChatRequest, "min_keep", 3, "leave it out"),
        (ChatRequest, "stop_token_ids", [7], "give texts as stop"),
        (ChatRequest, "length_penalty", 1.2, "beams"),
        (ChatRequest, "truncation", "auto", "too long"),
        (ResponsesRequest, "truncation", "auto", "too long"),
        (ResponsesRequest, "previous_response_id", "resp_1", "send the whole conversation"),
        (ResponsesRequest, "background", True, "send the whole conversation"),
        (ResponsesRequest, "prompt", {"id": "p"}, "no prompts are kept"),
        (MessagesRequest, "container", "c", "no code is run"),
        (MessagesRequest, "mcp_servers", [{"url": "http://x"}], "give them as tools"),
    ],
)
@pytest.mark.parametrize("ignores", [False, True])
def test_what_is_known_to_be_impossible_is_always_refused(
    model: type[BaseModel], name: str, value: Any, instead: str, ignores: bool
) -> None:
    fields = dict(BODIES)[model]
    read_body(model, body(fields, **{name: None}))
    with pytest.raises(RequestError, match=f"{name}: it is not possible here; .*{instead}") as why:
        read_body(model, body(fields, **{name: value}), ignores_unknown=ignores)
    assert why.value.body["error"]["param"] == name


@pytest.mark.parametrize("model", [ResponsesRequest, OllamaChat, MessagesRequest])
def test_an_api_that_has_no_grammars_does_not_ignore_one(model: type[BaseModel]) -> None:
    for name, value in (("grammar", 'root ::= "a"'), ("guided_regex", "a+")):
        with pytest.raises(RequestError, match=f"{name}: there is no such field"):
            read_body(model, body(dict(BODIES)[model], **{name: value}))


def test_the_penalty_by_its_name_in_vllm_counts() -> None:
    request = read_body(ChatRequest, body({"messages": MESSAGES}, repetition_penalty=1.25))
    assert isinstance(request, ChatRequest)
    assert request.repeat_penalty == 1.25


def test_a_refusal_names_few_fields_and_no_long_names() -> None:
    many = {f"{'x' * 1_000}{number}": 1 for number in range(9)}
    with pytest.raises(RequestError, match="and 6 more: there is no such field") as refused:
        read_body(ChatRequest, body({"messages": MESSAGES}, **many))
    assert len(str(refused.value.detail)) < 500
