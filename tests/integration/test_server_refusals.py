"""`entropykv serve` refuses requests by name, and the next request is answered."""

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


BAD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "grammar": (400, "/v1/completions", {"prompt": "a", "grammar": "root ::= ("}),
    "grammar of many groups": (
        400,
        "/v1/completions",
        {"prompt": "a", "grammar": "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000},
    ),
    "repeating grammar": (
        400,
        "/v1/completions",
        {"prompt": "a", "grammar": 'root ::= "a"{20000000}'},
    ),
    "no text": (400, "/v1/completions", {"prompt": "a", "grammar": 'root ::= root "a"'}),
    "grammar and min_tokens": (
        400,
        "/v1/completions",
        {"prompt": "a", "grammar": 'root ::= "a"', "min_tokens": 5},
    ),
    "bias": (400, "/v1/completions", {"prompt": "a", "logit_bias": {"100000": 1}}),
    "bias of no token": (400, "/v1/completions", {"prompt": "a", "logit_bias": {"-5": 1}}),
    "bias that is too large": (400, "/v1/completions", {"prompt": "a", "logit_bias": [[1, 1e4]]}),
    "bias of no pair": (400, "/v1/completions", {"prompt": "a", "logit_bias": [[1, 2, 3]]}),
    "n": (400, "/v1/completions", {"prompt": "a", "n": 0}),
    "best_of": (400, "/v1/completions", {"prompt": "a", "best_of": 3}),
    "no prompt": (400, "/v1/completions", {}),
    "empty list of prompts": (400, "/v1/completions", {"prompt": []}),
    "empty tokens": (400, "/v1/completions", {"prompt": [[]]}),
    "tokens that are none": (400, "/v1/completions", {"prompt": [1, 100_000]}),
    "no messages": (400, "/v1/chat/completions", {}),
    "empty messages": (400, "/v1/chat/completions", {"messages": []}),
    "unknown role": (400, "/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}),
    "image": (
        400,
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "data:,"}},
                    ],
                }
            ]
        },
    ),
    "required without tools": (
        400,
        "/v1/chat/completions",
        {"messages": MESSAGES, "tool_choice": "required"},
    ),
    "strict schema that is not enforced": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "strict": True,
                    "schema": {"type": "array", "items": {"type": "number", "not": {}}},
                },
            },
        },
    ),
    "stored response": (400, "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    "tool of OpenAI's": (400, "/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}),
    "response of an image": (
        400,
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
    ),
    "max_tokens": (400, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": -3}),
    "response_format": (
        400,
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "unknown"}},
    ),
    "tool_choice": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
        },
    ),
    "schema that is no grammar": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_object",
                "schema": {"type": "string", "format": "postcode"},
            },
        },
    ),
    "schema of too many values": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {"enum": [*range(20_001)]},
                },
            },
        },
    ),
    "tool that cannot be enforced": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "a",
                        "parameters": {
                            "type": "object",
                            "properties": {"x": {"type": "string", "format": "postcode"}},
                        },
                    },
                }
            ],
            "tool_choice": "required",
        },
    ),
    "response_format and min_tokens": (
        400,
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "json_object"}, "min_tokens": 50},
    ),
    "logprobs": (400, "/v1/completions", {"prompt": "a", "logprobs": 101}),
    "no string": (400, "/v1/completions", {"prompt": 7}),
    "long": (400, "/v1/completions", {"prompt": "a " * 2 * N_CTX}),
    "embeddings": (400, "/v1/embeddings", {"input": "a"}),
    "unknown route": (404, "/v1/nothing", {}),
    "too large": (413, "/v1/completions", {"prompt": "a" * 10_000_000}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name(server: Server, name: str, stream: bool) -> None:
    status, path, body = BAD[name]
    answer = server.post(path, json.dumps({**body, "stream": stream}))
    assert answer.status_code == status, answer.text
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
    except httpx.WriteError:  # The server closed the connection before everything was written.
        return
    assert status == 413


@pytest.mark.parametrize("path", ["/v1/models", "/v1/kv", "/metrics"])
def test_a_wrong_key_is_refused(server: Server, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = httpx.get(server.url + path, headers=headers)
        assert answer.status_code == 401
    with server.client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        complete(stranger)
