"""The server accepts requests with the fields and forms that Open WebUI, LibreChat and Continue
send.

The fields were taken from the sources of these programs: Open WebUI's utils/payload.py and its
routers, LibreChat's packages/api/src/endpoints/openai (whose requests LangChain's client writes),
Continue's core/llm/openaiTypeConverters.ts. The texts are our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.running_server import KEY, Server
from tests.support.served import served

SYSTEM = {"role": "system", "content": "You answer briefly."}
QUESTION = {"role": "user", "content": "Where is the garden?"}
ANSWER = {"role": "assistant", "content": "Behind the house."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Where is the garden?"}]}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search_notes",
        "description": "Find notes about a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "what to look for"}},
            "required": ["word"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "search_notes", "arguments": '{"word": "garden"}'},
}
USAGE = {"include_usage": True}

CHATS: dict[str, dict[str, Any]] = {
    "open-webui": {
        "stream": True,
        "model": "tiny",
        "messages": [SYSTEM, QUESTION, ANSWER, QUESTION],
        "stream_options": USAGE,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 8,
        "frequency_penalty": 0.0,
        "seed": 7,
        "stop": ["###"],
        "logit_bias": {},
        "reasoning_effort": "medium",
        "min_p": 0.05,
        "top_k": 40,
        "repeat_last_n": 64,
        "num_ctx": 2048,
    },
    "open-webui, a title": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "### Task: Name this chat as JSON."}],
        "stream": False,
        "max_completion_tokens": 8,
    },
    "open-webui, tools": {
        "stream": True,
        "model": "tiny",
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "It is behind the house."},
        ],
        "tools": [SEARCH],
        "stream_options": USAGE,
        "max_tokens": 8,
    },
    "librechat": {
        "model": "tiny",
        "temperature": 1,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stream": True,
        "stream_options": USAGE,
        "user": "6650f0c2a1",
        "max_tokens": 8,
        "reasoning": {"effort": "low"},
        "include_reasoning": True,
        "messages": [SYSTEM, PARTS],
    },
    "librechat, an agent with tools": {
        "model": "tiny",
        "stream": True,
        "stream_options": USAGE,
        "user": "6650f0c2a1",
        "tools": [SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tokens": 8,
        "messages": [
            {"role": "developer", "content": "You keep notes."},
            PARTS,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "tool",
                "name": "search_notes",
                "tool_call_id": "call_1",
                "content": [{"type": "text", "text": "It is behind the house."}],
            },
        ],
    },
    "librechat, a title": {
        "model": "tiny",
        "stream": False,
        "n": 1,
        "max_tokens": 400,
        "messages": [PARTS],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "title_of_chat",
                    "parameters": {
                        "type": "object",
                        "properties": {"title": {"enum": ["Garden", "House"]}},
                        "required": ["title"],
                        "additionalProperties": False,
                        "$schema": "http://json-schema.org/draft-07/schema#",
                    },
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "title_of_chat"}},
    },
    "continue": {
        "messages": [SYSTEM, QUESTION, {**ANSWER, "content": " "}, QUESTION],
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0.01,
        "stream": True,
        "stop": ["\n\n\n", "```"],
        "tools": [{**SEARCH, "function": {**SEARCH["function"], "strict": False}}],  # type: ignore[dict-item]
        "prediction": {"type": "content", "content": "def garden():"},
    },
}
COMPLETION = {
    "prompt": "def garden():\n    return ",
    "model": "tiny",
    "max_tokens": 8,
    "temperature": 0.01,
    "stream": True,
    "stop": ["<fim_prefix>", "<fim_suffix>", "/src/", "#- coding: utf-8", "\n\n", "```"],
}
HEADERS = {
    "authorization": f"Bearer {KEY}",
    "api-key": KEY,
    "content-type": "application/json",
    "user-agent": "OpenAI/JS 5.8.2",
    "x-stainless-lang": "js",
    "x-openwebui-user-name": "Ines",
    "http-referer": "https://librechat.ai",
}
OLLAMA: dict[str, Any] = {
    "model": "tiny:latest",
    "messages": [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Where is the garden?", "images": []},
    ],
    "stream": True,
    "options": {
        "temperature": 0.7,
        "num_predict": 8,
        "num_ctx": 2048,
        "num_keep": 4,
        "num_batch": 512,
        "repeat_last_n": 64,
        "mirostat": 0,
        "tfs_z": 1,
        "use_mmap": True,
        "num_gpu": 99,
        "num_thread": 2,
        "stop": ["###"],
    },
    "keep_alive": "5m",
}
"""A request of Open WebUI to a server that it uses as Ollama."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--api-key", KEY, "--cors-origins", "*")


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, content=json.dumps(body), headers=HEADERS, timeout=60)


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered_as_its_client_reads_it(server: Server, name: str) -> None:
    body = CHATS[name]
    response = post(server, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        message = response.json()["choices"][0]["message"]
        assert message["content"] or message["tool_calls"]
        return
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line[:7] == "data: {"]
    assert "".join(
        choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
    )
    if "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] <= 8


def test_a_forced_title_is_a_call(server: Server) -> None:
    answer = post(server, "/v1/chat/completions", CHATS["librechat, a title"]).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["title"] in ("Garden", "House")


def test_a_line_of_code_is_completed(server: Server) -> None:
    response = post(server, "/v1/completions", COMPLETION)
    assert response.status_code == 200, response.text
    assert '"text"' in response.text


def test_open_webui_takes_the_server_for_ollama(server: Server) -> None:
    for path in ("/api/version", "/api/tags", "/api/ps", "/v1/models"):
        assert httpx.get(server.url + path, headers=HEADERS, timeout=60).status_code == 200
    response = post(server, "/api/chat", OLLAMA)
    assert response.status_code == 200, response.text
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[-1]["done"]
    assert "".join(line["message"]["content"] for line in lines)


def test_a_page_of_another_origin_may_ask_with_its_headers(server: Server) -> None:
    asked = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-openwebui-user-name",
    }
    for path in ("/v1/chat/completions", "/api/chat"):
        answer = httpx.options(server.url + path, headers=asked, timeout=60)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"]
