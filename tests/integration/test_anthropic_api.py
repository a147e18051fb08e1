"""`entropykv serve` accepts requests of clients of Anthropic's Messages API, and answers in the
form of that API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.running_server import KEY, Server
from tests.support.served import served

QUESTION = {"role": "user", "content": "Where is the garden?"}
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny,other", "--api-key", KEY, "--cors-origins", "localhost")


def ask(server: Server, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    given = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [QUESTION], **body}
    return server.post(path, json.dumps(given))


def whole(server: Server, **body: Any) -> Any:
    response = ask(server, **body)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, **body: Any) -> list[Any]:
    response = ask(server, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_is_that_of_openai_s_route(server: Server) -> None:
    answer = whole(server)
    (block,) = answer["content"]
    assert block["type"] == "text"
    body = {"messages": [QUESTION], "max_tokens": 12, "temperature": 0}
    other = server.post("/chat/completions", json.dumps(body)).json()
    assert block["text"] == other["choices"][0]["message"]["content"]
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["model"] == "tiny"
    assert answer["stop_reason"] == "max_tokens"
    usage = answer["usage"]
    assert usage["output_tokens"] == 12
    n_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert n_prompt == other["usage"]["prompt_tokens"]


def test_a_stream_has_the_same_text_in_named_events(server: Server) -> None:
    answer = whole(server)
    found = events(server)
    assert [event["type"] for event in found[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in found[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    texts = [e["delta"]["text"] for e in found if e["type"] == "content_block_delta"]
    assert "".join(texts) == answer["content"][0]["text"]
    start, end = found[0]["message"], found[-2]
    assert start["content"] == []
    assert sum(start["usage"].values()) == sum(answer["usage"].values()) - 12
    assert end["usage"]["output_tokens"] == 12
    assert end["delta"]["stop_reason"] == "max_tokens"


def test_a_tool_that_must_be_called_is_called(server: Server) -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = whole(server, tools=[WEATHER], tool_choice=choice, max_tokens=100)
    (block,) = answer["content"]
    assert block["type"] == "tool_use"
    assert block["name"] == "weather"
    assert block["input"]["city"] in {"Paris", "Rome"}
    assert answer["stop_reason"] == "tool_use"
    found = events(server, tools=[WEATHER], tool_choice=choice, max_tokens=100)
    kinds = [event["type"] for event in found]
    assert kinds.count("content_block_start") == 1
    (given,) = [e["delta"] for e in found if e["type"] == "content_block_delta"]
    assert json.loads(given["partial_json"]) == block["input"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


CALL_AND_MORE = r"""
root ::= "<tool_call>" call "</tool_call>" [a-z ]*
call ::= "{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}"
"""
"""A grammar of answers that go on after a tool call."""


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_behind_the_only_call_that_is_wanted(server: Server, stream: bool) -> None:
    tool = {"name": "weather", "parameters": WEATHER["input_schema"]}
    body: dict[str, Any] = {
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": tool}],
        "grammar": CALL_AND_MORE,
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": {},
        "ignore_eos": True,
        "stream": stream,
        "stream_options": {"include_usage": True},
    }
    n_written = {}
    for parallel in (True, False):
        given = {**body, "parallel_tool_calls": parallel}
        response = server.post("/v1/chat/completions", json.dumps(given))
        assert response.status_code == 200, response.text
        if stream:
            lines = response.text.strip().split("\n\n")
            chunks = [json.loads(each.removeprefix("data: ")) for each in lines[:-1]]
            found = [each["choices"][0] for each in chunks if each["choices"]]
            calls = [c for each in found for c in each["delta"].get("tool_calls", ())]
            reason, usage = found[-1]["finish_reason"], chunks[-1]["usage"]
        else:
            answer = response.json()
            calls = answer["choices"][0]["message"]["tool_calls"]
            reason, usage = answer["choices"][0]["finish_reason"], answer["usage"]
        assert [each["function"]["name"] for each in calls] == ["weather"]
        assert reason == "tool_calls"
        n_written[parallel] = usage["completion_tokens"]
    assert n_written[True] == 200
    assert n_written[False] < 150  # The call has 77 characters, each of which may be a token.


def test_results_and_thoughts_are_read(server: Server) -> None:
    called = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "sunny", "is_error": True}
    text = {"type": "document", "source": {"type": "text", "data": "A text."}, "title": "Notes"}
    turns = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, called]},
        {"role": "user", "content": [result, text, {"type": "text", "text": "So?"}]},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert whole(server, messages=turns, system=system, tools=[WEATHER])["content"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("container", {"container": "c"}),
        ("context_management", {"context_management": {"edits": []}}),
        ("mcp_servers", {"mcp_servers": [{"url": "http://x"}]}),
        ("tools.0", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools.0.input_schema", {"tools": [{"name": "x"}]}),
        ("tool_choice.name", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("messages.0.content.0", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}),
        (
            "messages.0.content.0",
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        ),
        ("messages", {"messages": []}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_p", {"top_p": 2}),
        ("thinking.type", {"thinking": {"type": "maybe"}}),
        ("output_config.task_budget", {"output_config": {"task_budget": 1}}),
    ],
)
def test_what_is_asked_and_not_done_is_refused_by_name(
    server: Server, field: str, body: dict[str, Any]
) -> None:
    for stream in (False, True):
        response = ask(server, stream=stream, **body)
        assert response.status_code == 400, response.text
        error = response.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith(f"{field}: ")


def test_its_key_may_be_in_its_own_header(server: Server) -> None:
    body = {"max_tokens": 2, "messages": [QUESTION]}
    right = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": KEY})
    assert right.status_code == 200
    wrong = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "other"})
    assert wrong.status_code == 401
    assert wrong.json()["type"] == "error"
    assert wrong.json()["error"]["type"] == "authentication_error"


def test_further_names_are_listed(server: Server) -> None:
    (model,) = server.get("/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["aliases"] == ["other"]
    assert server.get("/v1/models/other").json()["id"] == "tiny"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:8080", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:3000", True),
        ("http://localhost.evil.com", False),
        ("http://notlocalhost", False),
        ("http://127.0.0.1.evil.com", False),
    ],
)
def test_pages_of_this_machine_may_use_it(server: Server, origin: str, allowed: bool) -> None:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    answer = httpx.options(f"{server.url}/v1/messages", headers=headers)
    assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


@pytest.mark.parametrize("path", ["/embeddings", "/rerank", "/lora-adapters"])
def test_what_is_not_served_says_so(server: Server, path: str) -> None:
    answer = server.post(path, "{}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
