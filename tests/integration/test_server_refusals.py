"""`entropykv serve` refuses wrong requests by name, and answers the next one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.running_server import KEY, N_CTX, Server
from tests.support.served import MESSAGES, assert_next_is_right, complete, served


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served(ENTROPYKV_API_KEY=KEY)


COMPLETIONS: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": "root ::= ("},
    "grammar of many groups": {"grammar": "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000},
    "repeating grammar": {"grammar": 'root ::= "a"{20000000}'},
    "no text": {"grammar": 'root ::= root "a"'},
    "grammar and min_tokens": {"grammar": 'root ::= "a"', "min_tokens": 5},
    "bias": {"logit_bias": {"100000": 1}},
    "bias of no token": {"logit_bias": {"-5": 1}},
    "bias that is too large": {"logit_bias": [[1, 1e4]]},
    "bias of no pair": {"logit_bias": [[1, 2, 3]]},
    "n": {"n": 0},
    "best_of": {"best_of": 3},
    "empty list of prompts": {"prompt": []},
    "empty tokens": {"prompt": [[]]},
    "tokens that are none": {"prompt": [1, 100_000]},
    "logprobs": {"logprobs": 101},
    "no string": {"prompt": 7},
    "long": {"prompt": "a " * 2 * N_CTX},
    "too large": {"prompt": "a" * 10_000_000},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
POSTCODE = {"type": "string", "format": "postcode"}
NOT_ENFORCED = {"type": "array", "items": {"type": "number", "not": {}}}
NAMED = {"type": "function", "function": {"name": "b"}}


def tools(parameters: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": "a", "parameters": parameters}}]


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", **fields}}


CHATS: dict[str, dict[str, Any]] = {
    "empty messages": {"messages": []},
    "unknown role": {"messages": [{"role": "x", "content": "a"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}]},
    "required without tools": {"tool_choice": "required"},
    "strict schema that is not enforced": {
        "response_format": schema(strict=True, schema=NOT_ENFORCED)
    },
    "max_tokens": {"max_tokens": -3},
    "top_logprobs without logprobs": {"top_logprobs": 5},
    "response_format": {"response_format": {"type": "unknown"}},
    "tool_choice": {"tools": tools({}), "tool_choice": NAMED},
    "schema that is no grammar": {"response_format": {"type": "json_object", "schema": POSTCODE}},
    "schema of too many values": {"response_format": schema(schema={"enum": [*range(20_001)]})},
    "tool that cannot be enforced": {
        "tools": tools({"type": "object", "properties": {"x": POSTCODE}}),
        "tool_choice": "required",
    },
    "response_format and min_tokens": {
        "response_format": {"type": "json_object"},
        "min_tokens": 50,
    },
}
IMAGE_OF_RESPONSES = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("/v1/completions", {"prompt": "a", **body}) for name, body in COMPLETIONS.items()},
    **{name: ("/v1/chat/completions", {"messages": MESSAGES, **b}) for name, b in CHATS.items()},
    "no prompt": ("/v1/completions", {}),
    "no messages": ("/v1/chat/completions", {}),
    "stored response": ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    "tool of OpenAI's": ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}),
    "response of an image": ("/v1/responses", {"input": [IMAGE_OF_RESPONSES]}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "unknown route": ("/v1/nothing", {}),
}
STATUSES = {"unknown route": 404, "too large": 413}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name(server: Server, name: str, stream: bool) -> None:
    path, body = BAD[name]
    answer = server.post(path, json.dumps({**body, "stream": stream}))
    assert answer.status_code == STATUSES.get(name, 400), answer.text
    error = answer.json()["error"]
    assert error["message"]
    kinds = {"long": "exceed_context_size_error", "unknown route": "not_found_error"}
    assert error["type"] == kinds.get(name, "invalid_request_error")


def test_the_next_request_is_right_after_all_of_them(client: openai.OpenAI) -> None:
    assert_next_is_right(client)


def test_what_a_long_prompt_is_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available") as caught:
        complete(client, "a " * 2 * N_CTX)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", ["", "{", '{"prompt": "a', "[]", "\x00"])
def test_a_body_that_is_no_request(server: Server, body: str) -> None:
    assert server.post("/v1/completions", body).status_code == 400


def test_a_body_of_unknown_length_has_the_same_limit(server: Server) -> None:
    pieces = iter([b'{"prompt": "', *[b"a" * 2**20] * 10, b'"}'])
    try:
        status = server.post("/v1/completions", pieces).status_code
    except httpx.WriteError:  # The server closed the connection before it had received everything.
        return
    assert status == 413


@pytest.mark.parametrize("path", ["/v1/models", "/v1/kv", "/metrics"])
def test_a_wrong_key_is_refused(server: Server, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = httpx.get(server.url + path, headers=headers)
        assert answer.status_code == 401
    with server.client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        complete(stranger)
