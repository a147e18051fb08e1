"""`entropykv serve` takes requests of Ollama's clients, and answers in the form of its API."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running_server import KEY, MODEL, N_CTX, Server
from tests.support.served import served
from tests.support.thinking import OPENING
from tests.support.tiny_vision import png
from tests.support.vision_models import write_vision

QUESTION = {"role": "user", "content": "Where is the garden?"}
SHORT = {"num_predict": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--api-key", KEY)


def ask(server: Server, path: str, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "options": SHORT, **body}
    return server.post(f"/api/{path}", json.dumps(given))


def whole(server: Server, path: str, **body: Any) -> Any:
    response = ask(server, path, stream=False, **body)
    assert response.status_code == 200, response.text
    return response.json()


def lines(server: Server, path: str, **body: Any) -> list[Any]:
    response = ask(server, path, **body)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_streamed_as_lines_unless_it_says_otherwise(server: Server) -> None:
    answer = whole(server, "chat", messages=[QUESTION])
    streamed = lines(server, "chat", messages=[QUESTION])
    assert "".join(line["message"]["content"] for line in streamed) == answer["message"]["content"]
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["done_reason"] == answer["done_reason"] == "length"
    assert answer["eval_count"] == 12
    assert answer["prompt_eval_count"] > 3
    assert 0 < answer["eval_duration"] < answer["total_duration"] < 60e9


def test_an_answer_is_that_of_openai_s_route(server: Server) -> None:
    body = {"messages": [QUESTION], "max_tokens": 12, "temperature": 0}
    other = server.post("/v1/chat/completions", json.dumps(body)).json()
    answer = whole(server, "chat", messages=[QUESTION])
    assert answer["message"]["content"] == other["choices"][0]["message"]["content"]


def test_options_are_those_of_the_request(server: Server) -> None:
    words = whole(server, "chat", messages=[QUESTION])["message"]["content"].split()
    stopped = whole(server, "chat", messages=[QUESTION], options={**SHORT, "stop": [words[2]]})
    assert words[2] not in stopped["message"]["content"]
    assert stopped["done_reason"] == "stop"
    seeded = [
        whole(server, "chat", messages=[QUESTION], options={"num_predict": 12, "seed": seed})
        for seed in (1, 1, 2)
    ]
    texts = [each["message"]["content"] for each in seeded]
    assert texts[0] == texts[1] != texts[2]


def test_a_format_is_followed(server: Server) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    schema["additionalProperties"] = False
    options = {"num_predict": 200, "temperature": 0}
    answer = whole(server, "chat", messages=[QUESTION], format=schema, options=options)
    assert json.loads(answer["message"]["content"]).keys() == {"sunny"}
    for raw in (False, True):
        body = {"prompt": "The weather", "format": schema, "options": options, "raw": raw}
        assert json.loads(whole(server, "generate", **body)["response"]).keys() == {"sunny"}


def test_tools_are_called_with_objects(server: Server) -> None:
    function = {"name": "walk", "parameters": {"type": "object", "properties": {}}}
    call = {"function": {"name": "walk", "arguments": {"to": "Rome"}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "walk", "content": "there"},
    ]
    tools = [{"type": "function", "function": function}]
    assert whole(server, "chat", messages=messages, tools=tools)["message"]["content"]


def test_generate_is_one_turn_or_a_text_that_goes_on(server: Server) -> None:
    turn = whole(server, "generate", prompt="Where is the garden?")
    assert turn["response"] == whole(server, "chat", messages=[QUESTION])["message"]["content"]
    raw = whole(server, "generate", prompt="The old garden", raw=True)
    body = {"prompt": "The old garden", "max_tokens": 12, "temperature": 0}
    other = server.post("/v1/completions", json.dumps(body)).json()
    assert raw["response"] == other["choices"][0]["text"]
    streamed = lines(server, "generate", prompt="The old garden", raw=True)
    assert "".join(line["response"] for line in streamed) == raw["response"]


@pytest.mark.parametrize(("path", "body"), [("chat", {"messages": []}), ("generate", {})])
def test_a_request_without_text_loads_the_model(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    answer = whole(server, path, **body, keep_alive="10m")
    assert answer["done_reason"] == "load"


def test_models_are_listed_and_shown(server: Server) -> None:
    (model,) = server.get("/api/tags").json()["models"]
    assert model["name"] == "tiny"
    assert model["size"] == MODEL.stat().st_size
    assert model["details"]["family"].startswith("bitnet")
    shown = server.post("/api/show", json.dumps({"model": "tiny:latest"})).json()
    assert shown["model_info"]["general.architecture"] == model["details"]["family"]
    assert "completion" in shown["capabilities"]
    assert "thinking" not in shown["capabilities"]
    (running,) = server.get("/api/ps").json()["models"]
    assert running["digest"] == model["digest"]
    assert server.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("chat", {"messages": [{**QUESTION, "images": ["aGk="]}]}, "--mmproj"),
        ("generate", {"prompt": "a", "images": ["aGk="]}, "--mmproj"),
        ("generate", {"prompt": "a", "images": ["aGk="], "raw": True}, "leave out raw"),
        ("chat", {"messages": [QUESTION], "options": {"num_ctx": N_CTX + 1}}, "num_ctx"),
        ("chat", {"messages": [QUESTION], "think": True}, "does not support thinking"),
        ("chat", {"messages": [QUESTION], "format": "yaml"}, "format"),
        ("chat", {"messages": [{"role": "judge", "content": "a"}]}, "role"),
        ("chat", {"messages": [QUESTION], "options": {"top_p": 3}}, "top_p"),
        ("generate", {"prompt": "a", "context": [1, 2]}, "/api/chat"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "--chat-template"),
        ("pull", {}, "-hf"),
        ("embed", {"input": "a"}, "embeddings"),
    ],
)
def test_what_cannot_be_is_one_sentence_in_their_form(
    server: Server, path: str, body: dict[str, Any], sentence: str
) -> None:
    response = ask(server, path, **body)
    assert response.status_code == 400
    assert sentence in response.json()["error"]


def test_errors_of_every_layer_have_their_form(server: Server) -> None:
    no_key = httpx.post(f"{server.url}/api/chat", json={"model": "tiny"}, timeout=60)
    assert no_key.status_code == 401
    assert isinstance(no_key.json()["error"], str)
    too_long = server.post("/api/chat", b"{" + b" " * (2 << 20))
    assert too_long.status_code == 413
    assert isinstance(too_long.json()["error"], str)
    unknown = server.get("/api/unknown")
    assert unknown.status_code == 404
    assert isinstance(unknown.json()["error"], str)
    assert isinstance(server.get("/v1/unknown").json()["error"], dict)


def test_a_prompt_that_is_too_long_is_refused_before_the_first_line(server: Server) -> None:
    response = ask(server, "chat", messages=[{"role": "user", "content": "a " * N_CTX}])
    assert response.status_code == 400
    assert "context" in response.json()["error"]


def test_thoughts_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(OPENING, encoding="utf-8")
    options = ("--chat-template-file", path, "--reasoning-budget", 20, "--alias", "tiny")
    with Server(*options, "--api-key", KEY) as server:
        given: dict[str, Any] = {"num_predict": 60, "temperature": 0}
        answer = whole(server, "chat", messages=[QUESTION], options=given)
        assert answer["message"]["thinking"]
        assert "think" not in answer["message"]["content"]
        without = whole(server, "chat", messages=[QUESTION], options=given, think=False)
        assert "thinking" not in without["message"]
        text = whole(server, "generate", prompt="Where is the garden?", options=given, think=True)
        assert text["thinking"] == answer["message"]["thinking"]
        shown = server.post("/api/show", json.dumps({"model": "tiny"})).json()
        assert "thinking" in shown["capabilities"]
        again = [QUESTION, answer["message"], QUESTION]
        assert whole(server, "chat", messages=again, options=given)["done"]


def test_images_are_those_of_openai_s_route(tmp_path: Path) -> None:
    model = write_vision("causal", tmp_path)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    usual = ("--kv-budget", 128, "--kv-type", "f16", "--n_ctx", 512, "-t", 1)
    options = ("--mmproj", model.projector, "--chat-template", template, "--alias", "tiny")
    with Server(*options, "--api-key", KEY, model=model.path, usual=usual) as server:
        data = base64.b64encode(png(64, 40)).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": "what is it"},
        ]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 12}
        body["temperature"] = 0
        other = server.post("/v1/chat/completions", json.dumps(body)).json()
        expected = other["choices"][0]["message"]["content"]
        message = {"role": "user", "content": "what is it", "images": [data]}
        assert whole(server, "chat", messages=[message])["message"]["content"] == expected
        text = whole(server, "generate", prompt="what is it", images=[data])
        assert text["response"] == expected
        assert "vision" in server.post("/api/show", '{"model": "tiny"}').json()["capabilities"]
